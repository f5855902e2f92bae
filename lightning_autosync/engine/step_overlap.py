"""`StepOverlap`: the sums of a pass travel while the next forward pass computes.

When a backward pass ends, sums may still be on their way. Their parameters are marked as due (see `DueParameter`). The
optimizer's step leaves them out, and is made for each message when a reader asks for one of its parameters, usually the
module that comes next in the forward pass. So all readers see the values that they would see without overlap, and
whatever cannot wait simply does not: a function that reads gradients before the step waits for them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from threading import RLock
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_autosync.engine.due_parameter import Due, due_of, mark, unmark
from lightning_autosync.engine.engine import Engine
from lightning_autosync.engine.optimizer_steps import DeferredStep, make_steps, why_whole
from lightning_autosync.engine.stale_reads import StaleReads
from lightning_autosync.errors import ExchangeError

_taken: WeakKeyDictionary[Optimizer, list[_Taken]] = WeakKeyDictionary()
"""For an optimizer that steps the parameters that are not due: its groups, without those that are."""
_deferring: WeakKeyDictionary[Optimizer, None] = WeakKeyDictionary()
_HOOKED_STEP = Optimizer.profile_hook_step(Optimizer.step).__code__
"""Code that runs the hooks of every optimizer's step."""


class _Taken(NamedTuple):
    """A group of an optimizer, all its parameters, those of them that are due, and the step to make for these."""

    group: dict[str, Any]
    parameters: list[nn.Parameter]
    due: list[nn.Parameter]
    step: DeferredStep


class StepOverlap:
    """Defers optimizers' steps of the parameters of a module until their gradients have come and they are read.

    Args:
        module: the module whose parameters an engine synchronizes.
        check_reads: whether to find readers of memory whose step is due; see `StaleReads`.
        on_wait: called with the first function (its name, file and line) that reads gradients before a step.
    """

    def __init__(
        self, module: nn.Module, check_reads: bool = False, on_wait: Callable[[str], None] | None = None
    ) -> None:
        self._lock = RLock()
        self._open: dict[int, list[nn.Parameter]] = {}
        self._engine: Engine | None = None
        self._failure: ExchangeError | None = None
        self._released: list[tuple[nn.Parameter, Due]] = []
        self._on_wait = on_wait
        self._handles: list[RemovableHandle] = [
            part.register_forward_pre_hook(_before_forward, prepend=True)
            for part in module.modules()
            if part._parameters
        ]
        self._checking = ExitStack()
        if check_reads:
            self._checking.enter_context(StaleReads(module))

    def follow(self, engine: Engine) -> None:
        """Overlap the passes of ``engine`` from now on.

        Args:
            engine: an engine that was made with ``waits="parameters"``. Set its ``waits`` to ``backward`` for passes
                that shall not overlap.
        """
        self.settle()
        if self._engine is not None:
            self._engine.on_launch = self._engine.before_pass = None
        self._engine = engine
        engine.on_launch, engine.before_pass = self._begin, self.settle

    def settle(self) -> None:
        """Wait for all sums under way, and make all steps that are due.

        Raises:
            ExchangeError: a peer was lost or did not answer in time.
        """
        for index in sorted(self._open):
            self.complete(index)

    def complete(self, index: int) -> None:
        """See `Owner.complete`."""
        with self._lock:
            if self._failure is not None:
                raise self._failure  # whatever is due has no value
            members = self._open.pop(index, None)
            if members is None:
                return
            assert self._engine is not None
            due = _unmark(members)
            # The reader may be a forward pass in inference mode, whose tensors could not be used in later steps.
            with torch.inference_mode(False), torch.no_grad():
                try:
                    self._engine.finish_message(index)
                except BaseException as error:
                    self._keep(index, due, error)
                    raise
                released, self._released = self._released, []
                _apply(due + released)

    def release(self) -> None:
        """Let everybody read parameters as they are, until the message that is being completed is complete.

        The engine's caller needs this when it exchanges all gradients of a pass again.
        """
        members = [parameter for members in self._open.values() for parameter in members]
        self._open.clear()
        self._released = _unmark(members)

    def note_reader(self, reader: str) -> None:
        """See `Owner.note_reader`."""
        on_wait, self._on_wait = self._on_wait, None
        if on_wait is not None:
            on_wait(reader)

    def close(self) -> None:
        """Settle, and stop deferring steps. After a failure, parameters without a value raise when they are read."""
        with suppress(ExchangeError):  # kept for the readers
            self.settle()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._checking.close()
        if self._engine is not None:
            self._engine.on_launch = self._engine.before_pass = None
            self._engine = None

    def _begin(self) -> None:
        """Mark the parameters of all messages that are under way at the end of a backward pass."""
        assert self._engine is not None
        for index in self._engine.pending:
            members = [each for each in self._engine.members(index) if each.requires_grad]
            if all(type(each) is nn.Parameter for each in members):
                self._open[index] = members
                for each in members:
                    mark(each, Due(self, index))
            else:
                self._engine.finish_message(index)

    def _keep(self, index: int, due: list[tuple[nn.Parameter, Due]], error: BaseException) -> None:
        """Keep a message due that could not be completed: readers fail, or try again after a Ctrl-C."""
        if isinstance(error, ExchangeError):
            self._failure = error
        self._open[index] = [parameter for parameter, _ in due]
        for parameter, what in due:
            mark(parameter, what)


def defer_steps(optimizer: Optimizer) -> str:
    """Let the steps of an optimizer leave out parameters that are due; these are made when the parameters are read.

    Returns:
        The reason why this cannot be done; empty if it is done. Steps then wait for all sums.
    """
    reason = why_whole(optimizer)
    if reason or optimizer in _deferring:
        return reason
    _deferring[optimizer] = None
    optimizer.register_step_pre_hook(_before_step)
    optimizer.register_step_post_hook(_after_step)
    optimizer.register_state_dict_pre_hook(_complete_all)
    optimizer.register_load_state_dict_pre_hook(_complete_all)
    return ""


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _is_within_step(optimizer):
        return None
    _restore(optimizer)  # after a step that raised
    closure: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        _take(optimizer)
        return None

    def closure_first() -> Any:
        result = closure()
        _take(optimizer)
        return result

    return (optimizer, *args[2:]), {**kwargs, "closure": closure_first}


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    if _is_within_step(optimizer):
        return
    late: list[tuple[nn.Parameter, DeferredStep]] = []
    for taken in _restore(optimizer):
        for parameter in taken.due:
            if (due := due_of(parameter)) is not None:
                due.step = taken.step
            else:  # somebody read its gradient in the meantime
                late.append((parameter, taken.step))
    make_steps(late)


def _is_within_step(optimizer: Optimizer) -> bool:
    """Whether a hook of a step runs because the step of a subclass calls that of its parent."""
    frame: FrameType | None = sys._getframe(1)
    calls = 0
    while frame is not None:
        calls += frame.f_code is _HOOKED_STEP and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return calls > 1


def _take(optimizer: Optimizer) -> None:
    """Take the parameters that are due out of the optimizer's groups."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (due := due_of(parameter)) is not None and due.step is not None:  # a second step with this gradient
                due.owner.complete(due.message)
    _taken[optimizer] = []
    for group in optimizer.param_groups:
        parameters = group["params"]
        due_ones = [parameter for parameter in parameters if due_of(parameter) is not None]
        _taken[optimizer].append(_Taken(group, parameters, due_ones, DeferredStep(optimizer, group)))
        group["params"] = [parameter for parameter in parameters if due_of(parameter) is None]


def _restore(optimizer: Optimizer) -> list[_Taken]:
    """Put all parameters back; returns what was taken."""
    taken = _taken.pop(optimizer, [])
    for each in taken:
        each.group["params"] = each.parameters
    return taken


def _complete_all(optimizer: Optimizer, *_: Any) -> None:
    _restore(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (due := due_of(parameter)) is not None:
                due.owner.complete(due.message)


def _before_forward(module: nn.Module, _: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for parameter in module._parameters.values():
        due = due_of(parameter)
        if due is not None and due.step is not None:
            due.owner.complete(due.message)


def _unmark(parameters: list[nn.Parameter]) -> list[tuple[nn.Parameter, Due]]:
    return [(parameter, due) for parameter in parameters if (due := unmark(parameter)) is not None]


def _apply(due: list[tuple[nn.Parameter, Due]]) -> None:
    for parameter, what in due:
        if what.limit is not None and parameter.grad is not None:
            nn.utils.clip_grad_value_(parameter, what.limit)
    make_steps([(parameter, what.step) for parameter, what in due if what.step is not None])
    for parameter, what in due:
        if what.clears and what.step is not None:
            parameter.grad = None
        elif what.clears is False and parameter.grad is not None:
            parameter.grad.zero_()
