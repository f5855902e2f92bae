"""`DueParameter`: the class of a parameter while the sum of its gradient, or its optimizer's step, is still to come.

PyTorch asks a tensor's class before it runs a function on the tensor, also where the function is an attribute such as
``grad`` or ``data``. A parameter changes its class while something is due for it, so every reader waits for that first:
modules, callbacks, checkpoints, averages of weights, other optimizers. Other tensors cost nothing.

Two kinds of readers are not seen: those that hold another tensor with the same memory from an earlier step (a view, or
``parameter.data``), and extensions in C++ that take the tensor without PyTorch's parser of arguments. Modules therefore
also wait before their forward pass; `StaleReads` finds the rest.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, FunctionType
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autosync.engine.optimizer_steps import DeferredStep


class Owner(Protocol):
    """What completes the parameters of a message."""

    def complete(self, index: int) -> None:
        """Wait for the sums of the message with this index, and make the optimizer's steps that are due.

        All its parameters have their own class again afterwards.

        Raises:
            ExchangeError: a peer was lost or did not answer in time.
        """

    def note_reader(self, reader: str) -> None:
        """Called when gradients are read before a step; ``reader`` is the function, with its file and line."""


@dataclass
class Due:
    """What is due for one parameter.

    Attributes:
        owner: completes it.
        message: index of its message.
        step: the optimizer's step that has been called for it; None while only the sum of its gradient is due.
        limit: the ``clip_value`` of a ``clip_grad_value_`` that was called before the step; None if there was none.
        clears: the ``set_to_none`` of a ``zero_grad`` that was called after that step; None if there was none.
    """

    owner: Owner
    message: int
    step: DeferredStep | None = None
    limit: float | None = None
    clears: bool | None = None


_descriptor: Any = Tensor.grad
_GET_GRADIENT = _descriptor.__get__
_GRADIENT = {_GET_GRADIENT, _descriptor.__set__, _descriptor.__delete__}
_ATTRIBUTES = (
    "device", "dtype", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_sparse", "itemsize", "layout",
    "nbytes", "ndim", "requires_grad", "shape",
)  # fmt: skip
_METHODS = (
    "dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point", "is_inference",
    "is_signed", "ndimension", "nelement", "numel", "size", "storage_offset", "stride",
)  # fmt: skip
_FORM = {getattr(Tensor, name).__get__ for name in _ATTRIBUTES} | {getattr(Tensor, name) for name in _METHODS}
_FORM |= {torch.is_floating_point, torch.is_complex, torch.numel}
"""Functions that read neither the values of a tensor nor its gradient."""
_CLEARING = {inspect.unwrap(method).__code__ for method in (Optimizer.zero_grad, nn.Module.zero_grad)}
_LIMITING = inspect.unwrap(nn.utils.clip_grad_value_).__code__


class DueParameter(nn.Parameter):
    """A parameter for which something is due. Set with `mark`; `unmark` gives the parameter its own class again."""

    _autosync_due: Due

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rest = False
        for parameter in list(_due_in((args, kwargs))):
            if type(parameter) is not DueParameter:  # it was completed together with an earlier one
                continue
            due = parameter._autosync_due
            if func in _FORM:
                rest = True
            elif due.step is None:
                if func == _GET_GRADIENT and (limit := _limit_of(sys._getframe(1))) is not None:
                    # Values are clipped one by one, so that the sum may come later.
                    due.limit = limit if due.limit is None else min(limit, due.limit)
                    with torch._C.DisableTorchFunctionSubclass():
                        return parameter.new_empty(0)  # to clip in place of the gradient
                if func in _GRADIENT:
                    due.owner.note_reader(_reader(sys._getframe(1)))
                # A function in Python may read other parameters, and calls on parameters must be seen there too.
                elif not isinstance(func, FunctionType):
                    rest = True
                    continue
                due.owner.complete(due.message)
            elif func == _GET_GRADIENT and sys._getframe(1).f_code in _CLEARING:
                # The gradient is cleared after the step, so that the usual `step(); zero_grad()` waits for nothing.
                due.clears = bool(sys._getframe(1).f_locals["set_to_none"])
                return None
            else:
                due.owner.complete(due.message)
        if not rest:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._autosync_due.owner.complete(self._autosync_due.message)
        return self.__deepcopy__(memo)  # that of its own class

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._autosync_due.owner.complete(self._autosync_due.message)
        return self.__reduce_ex__(protocol)


def mark(parameter: nn.Parameter, due: Due) -> DueParameter:
    """Let all readers of ``parameter`` wait for what is due."""
    # `torch.nn.UninitializedParameter` changes its class in the same way.
    parameter.__class__ = DueParameter
    marked = cast(DueParameter, parameter)
    marked._autosync_due = due
    return marked


def unmark(parameter: Any) -> Due | None:
    """Give ``parameter`` its own class again; returns what was due, None if nothing was."""
    due = due_of(parameter)
    if due is not None:
        del parameter._autosync_due
        parameter.__class__ = nn.Parameter
    return due


def due_of(parameter: Any) -> Due | None:
    """What is due for a parameter; None if nothing is."""
    return parameter._autosync_due if type(parameter) is DueParameter else None


def _due_in(value: Any) -> Iterator[DueParameter]:
    if type(value) is DueParameter:
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _due_in(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _due_in(part)


def _limit_of(frame: FrameType) -> float | None:
    """The limit, if ``clip_grad_value_`` reads a gradient in this frame."""
    caller = _function_of(frame)
    return float(caller.f_locals["clip_value"]) if caller.f_code is _LIMITING else None


def _function_of(frame: FrameType) -> FrameType:
    """The frame of the function to which a comprehension belongs."""
    while frame.f_code.co_name in ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>") and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _reader(frame: FrameType) -> str:
    frame = _function_of(frame)
    code = frame.f_code
    return f"{code.co_name} ({code.co_filename.rpartition('/')[2]}:{frame.f_lineno})"
