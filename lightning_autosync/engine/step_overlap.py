"""`StepOverlap`: the sums of a pass travel while the next forward pass computes.

When a backward pass ends, sums may still be on their way. Their parameters are marked as due (see `DueParameter`). The
optimizer's step leaves them out, and is made for each message when a reader asks for one of its parameters, usually the
module that comes next in the forward pass. So all readers see the values that they would see without overlap, and
whatever cannot wait simply does not: a function that reads gradients before the step waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from threading import RLock
from typing import Any
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

_taken: WeakKeyDictionary[Optimizer, list[tuple[dict[str, Any], list[nn.Parameter]]]] = WeakKeyDictionary()
"""For an optimizer that steps the parameters that are not due: its groups, and all their parameters."""
_deferring: WeakKeyDictionary[Optimizer, None] = WeakKeyDictionary()


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
        self._failure: BaseException | None = None
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
        """Overlap the passes of ``engine`` from now on, where its ``waits`` says so."""
        self.settle()
        if self._engine is not None:
            self._engine.on_launch = self._engine.before_pass = None
        self._engine = engine
        engine.on_launch, engine.before_pass = self._begin, self.settle
        engine.renew_hooks()

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
                    self._fail(error, due)
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
        try:
            if self._failure is None:
                self.settle()
        except ExchangeError:
            pass  # kept for the readers
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

    def _fail(self, error: BaseException, due: list[tuple[nn.Parameter, Due]]) -> None:
        """Let readers of parameters whose step could not be made fail, rather than see old values."""
        self._failure = error
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
    optimizer.register_step_post_hook(lambda stepping, *_: _restore(stepping))
    optimizer.register_state_dict_pre_hook(_complete_all)
    optimizer.register_load_state_dict_pre_hook(_complete_all)
    return ""


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _restore(optimizer)
    closure: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        _take(optimizer)
        return None

    def closure_first() -> Any:
        result = closure()
        _take(optimizer)
        return result

    return (optimizer, *args[2:]), {**kwargs, "closure": closure_first}


def _take(optimizer: Optimizer) -> None:
    """Take the parameters that are due out of the optimizer's groups, and note the step for them."""
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    for group, parameters in groups:
        step, kept = DeferredStep(optimizer, group), []
        for parameter in parameters:
            due = due_of(parameter)
            if due is not None and due.step is not None:  # a second step with the same gradient
                due.owner.complete(due.message)
                due = None
            if due is None:
                kept.append(parameter)
            else:
                due.step = step
        group["params"] = kept
    _taken[optimizer] = groups


def _restore(optimizer: Optimizer) -> None:
    for group, parameters in _taken.pop(optimizer, []):
        group["params"] = parameters


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
        if what.limit is not None:
            nn.utils.clip_grad_value_(parameter, what.limit)
    make_steps([(parameter, what.step) for parameter, what in due if what.step is not None])
    for parameter, what in due:
        if what.clears and what.step is not None:
            parameter.grad = None
        elif what.clears is False and parameter.grad is not None:
            parameter.grad.zero_()
