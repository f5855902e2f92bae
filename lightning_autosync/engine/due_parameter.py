"""`DueParameter`: the class of a parameter while the sum of its gradient, or its optimizer's step, is still to come.

PyTorch asks a tensor's class before it runs a function on the tensor, also where the function is an attribute such as
``grad`` or ``data``. A parameter changes its class while something is due for it, so every reader waits for that first:
modules, callbacks, checkpoints, averages of weights, other optimizers. Other tensors cost nothing.

Some readers are not seen: those that hold another tensor with the same memory from an earlier step (a view, or
``parameter.data``), extensions in C++ that take the tensor without PyTorch's parser of arguments, and arguments of
functions that ``torch.func`` transforms. Modules therefore also wait before their forward pass, and `StaleReads` finds
aliases. docs/overlap.md lists what is left.
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
from torch.optim.optimizer import _foreach_supported_types

from lightning_autosync.engine.optimizer_steps import DeferredStep
from lightning_autosync.errors import ExchangeError


class Owner(Protocol):
    """What completes the parameters of a message.

    Attributes:
        failure: the error because of which its parameters that are due get no value; None if there is none.
    """

    failure: ExchangeError | None

    def complete(self, index: int) -> None:
        """Wait for the sums of the message with this index, and make the optimizer's steps that are due.

        All its parameters have their own class again afterwards.

        Raises:
            ExchangeError: a peer was lost or did not answer in time.
        """

    def begin_step(self) -> None:
        """Called where an optimizer's step is called with parameters that are due, before `defer`."""

    def defer(self, parameter: nn.Parameter, step: DeferredStep) -> bool:
        """Let ``step`` be due for a parameter; returns False if it has been completed, so that nothing is due."""

    def note_reader(self, reader: str) -> None:
        """Called when gradients are read before a step; ``reader`` is the function, with its file and line."""


@dataclass
class Due:
    """What is due for one parameter.

    Attributes:
        owner: completes it.
        message: index of its message.
        step: the optimizer's step that has been called for it; None while only the sum of its gradient is due.
        inverse: number by which the gradient is multiplied before all else, because a loss scaler unscaled gradients
            before the step; None if none did.
        factor: number by which the gradient is multiplied, because gradients were clipped by their norm before the
            step; None if they were not.
        limit: the ``clip_value`` of a ``clip_grad_value_`` that was called before the step, after ``factor`` was set;
            None if there was none.
        clears: the ``set_to_none`` of a ``zero_grad`` that was called after that step; None if there was none.
        stepping: whether the step is being made.
    """

    owner: Owner
    message: int
    step: DeferredStep | None = None
    inverse: Tensor | None = None
    factor: Tensor | None = None
    limit: float | None = None
    clears: bool | None = None
    stepping: bool = False

    @property
    def clipped_or_stepped(self) -> bool:
        """Whether the gradient is clipped when it comes, or a step was called that uses it."""
        return self.step is not None or self.factor is not None or self.limit is not None

    def limit_later(self, frame: FrameType) -> bool:
        """Whether ``clip_grad_value_`` reads the gradient in this frame; it is then clipped when it has come."""
        caller = _function_of(frame)
        if caller.f_code is not _LIMITING:
            return False
        # Values are clipped one by one, so that the sum may come later.
        limit = float(caller.f_locals["clip_value"])
        self.limit = limit if self.limit is None else min(limit, self.limit)
        return True

    def clear_later(self, frame: FrameType) -> bool:
        """Whether ``zero_grad`` reads the gradient in this frame; it is then cleared after the step.

        So the usual `step(); zero_grad()` waits for nothing.
        """
        if frame.f_code not in _CLEARING:
            return False
        self.clears = bool(self.clears or frame.f_locals["set_to_none"])  # a gradient of None stays None
        return True


_descriptor: Any = Tensor.grad
_GET_GRADIENT = _descriptor.__get__
_NEEDS_GRADIENT = {_GET_GRADIENT, _descriptor.__set__, _descriptor.__delete__}
_NEEDS_GRADIENT |= {_attribute.__set__ for _attribute in cast(Any, (Tensor.requires_grad, Tensor.data))}
_NEEDS_GRADIENT |= {Tensor.requires_grad_, Tensor.detach_, Tensor.set_}
"""Functions that read gradients or change what they belong to. Sums are written to parameters as they were."""
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
        found = list(_due_in((args, kwargs)))
        if func not in _FORM:
            for parameter in found:
                due = due_of(parameter)
                if due is None:  # it was completed together with an earlier one
                    continue
                if due.step is not None:
                    if func == _GET_GRADIENT and due.clear_later(sys._getframe(1)):
                        return None
                    due.owner.complete(due.message)
                elif func == _GET_GRADIENT and due.limit_later(sys._getframe(1)):
                    with torch._C.DisableTorchFunctionSubclass():
                        return parameter.new_empty(0)  # to clip in place of the gradient
                elif func in _NEEDS_GRADIENT:
                    due.owner.note_reader(_reader(sys._getframe(1)))
                    due.owner.complete(due.message)
                # A function in Python may read gradients, and other classes of tensors must see the call.
                elif isinstance(func, FunctionType) or any(kind is not cls for kind in types):
                    due.owner.complete(due.message)
        if any(due_of(parameter) is not None for parameter in found):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._autosync_due.owner.complete(self._autosync_due.message)
        return self.__deepcopy__(memo)  # that of its own class

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._autosync_due.owner.complete(self._autosync_due.message)
        return self.__reduce_ex__(protocol)


# Optimizers choose their faster functions on GPUs by the classes of parameters. They find this one in deferred steps.
_foreach_supported_types.append(DueParameter)


def mark(parameter: nn.Parameter, due: Due) -> DueParameter:
    """Let all readers of ``parameter`` wait for what is due."""
    # Other threads may read the parameter at the same time, so its class changes when all else is set.
    marked = cast(DueParameter, parameter)
    marked._autosync_due = due
    # `torch.nn.UninitializedParameter` changes its class in the same way.
    parameter.__class__ = DueParameter
    return marked


def unmark(parameter: Any) -> Due | None:
    """Give ``parameter`` its own class again; returns what was due, None if nothing was."""
    due = due_of(parameter)
    if due is not None:
        parameter.__class__ = nn.Parameter
        del parameter._autosync_due
    return due


def due_of(parameter: Any) -> Due | None:
    """What is due for a parameter; None if nothing is."""
    return vars(parameter).get("_autosync_due") if type(parameter) is DueParameter else None


def _due_in(value: Any) -> Iterator[DueParameter]:
    if type(value) is DueParameter:
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _due_in(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _due_in(part)


def _function_of(frame: FrameType) -> FrameType:
    """The frame of the function to which a comprehension belongs."""
    while frame.f_code.co_name in ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>") and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _reader(frame: FrameType) -> str:
    frame = _function_of(frame)
    code = frame.f_code
    return f"{code.co_name} ({code.co_filename.rpartition('/')[2]}:{frame.f_lineno})"
