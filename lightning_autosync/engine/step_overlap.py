"""`StepOverlap`: the sums of a pass travel while the next forward pass computes.

When a backward pass ends, sums may still be on their way. Their parameters are marked as due (see `DueParameter`). The
optimizer's step leaves them out, and is made for each message when a reader asks for one of its parameters, usually the
module that comes next in the forward pass. Before a reader waits, steps of other messages that have come are made, too,
on CPUs and for PyTorch's own optimizers. So readers see the values that they would see without overlap, and functions
that need gradients before the step wait for them. docs/overlap.md lists readers that are not seen.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from threading import RLock
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_autosync.engine.due_parameter import Due, due_of, mark, unmark
from lightning_autosync.engine.engine import Engine
from lightning_autosync.engine.launched_gradients import LaunchedGradients, change_gradients
from lightning_autosync.engine.optimizer_steps import (
    DeferredStep,
    hooks_would_see_parts,
    make_steps,
    part_of,
    take_over,
    why_whole,
)
from lightning_autosync.engine.stale_reads import StaleReads, StaleStates
from lightning_autosync.engine.step_stream import StepStream, keep
from lightning_autosync.errors import ExchangeError

_deferring: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()
"""Optimizers whose steps leave out parameters that are due, and the handles of `_before_step`."""
_MOST_READERS = 10
"""Largest number of functions of which `StepOverlap` tells that they wait."""
_TAKEN = "_autosync_taken"
"""Attribute of a part of an optimizer: a `_Taken` for each of its groups."""


class _Taken(NamedTuple):
    """The parameters of a group that are due, and the step to make for them."""

    due: list[nn.Parameter]
    step: DeferredStep


class StepOverlap:
    """Defers optimizers' steps of the parameters of a module until their gradients have come and they are read.

    Args:
        module: the module whose parameters an engine synchronizes.
        check_reads: whether to find readers of memory whose step is due; see `StaleReads`.
        on_wait: called with each function (its name, file and line) that reads gradients before a step, once, and with
            ten functions at most.

    Attributes:
        failure: see `Owner.failure`.
        waiting: makes the context in which a reader waits for sums and makes the optimizer's step.
    """

    def __init__(
        self, module: nn.Module, check_reads: bool = False, on_wait: Callable[[str], None] | None = None
    ) -> None:
        self.failure: ExchangeError | None = None
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        self._lock = RLock()
        self._open: dict[int, list[nn.Parameter]] = {}
        self._engine: Engine | None = None
        self._released: list[nn.Parameter] = []
        self._launched: LaunchedGradients | None = None
        self._on_wait = on_wait
        self._readers: set[str] = set()
        # Hooks of the modules themselves would be saved with them, and would turn off faster paths of evaluation.
        self._stream = StepStream(module)
        hooks = [self._stream.before_forward] if self._stream.on_device else []
        self._hooks: list[RemovableHandle] = list(map(register_module_forward_pre_hook, [*hooks, _before_forward]))
        self._checking = ExitStack()
        self._reads = self._checking.enter_context(StaleReads(module)) if check_reads else None

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
        # Before the engine's connections are closed, and last of all if it is called again.
        atexit.unregister(self._end_with_process)
        atexit.register(self._end_with_process)

    def settle(self) -> None:
        """Wait for all sums under way, and make all steps that are due.

        Raises:
            ExchangeError: a peer was lost or did not answer in time.
        """
        with self._lock:
            for index in sorted(self._open):
                self.complete(index)
            self._stream.wait()

    @torch._disable_dynamo  # code that is compiled may read a parameter, but its step must not become a part of it
    def complete(self, index: int) -> None:
        """See `Owner.complete`. Other threads that read one of the parameters meanwhile wait until this is done."""
        with self._lock:
            if self.failure is not None:
                raise self.failure  # whatever is due has no value
            if index not in self._open:
                self._stream.wait()  # another thread has just completed it, perhaps on another stream
                return
            if torch.jit.is_tracing():
                raise ExchangeError(
                    "overlap='step': torch.jit.trace would record a deferred optimizer step; call "
                    "strategy.settle() before it"
                )
            self._step_meanwhile(index)
            members = self._open.pop(index, None)
            if members is None:  # completed with another one, since some rank's parameters have changed
                return
            # The reader may be a forward pass in inference mode, whose tensors could not be used in later steps.
            # Parameters stay marked for other threads until their step is made; this thread reads past the marks.
            with ExitStack() as contexts:
                if torch._C._functorch.peek_interpreter_stack() is not None:  # a function that torch.func transforms
                    contexts.enter_context(temporarily_clear_interpreter_stack())
                contexts.enter_context(self.waiting())
                contexts.enter_context(self._stream.stepping())
                contexts.enter_context(torch.inference_mode(False))
                contexts.enter_context(torch.no_grad())
                contexts.enter_context(torch._C.DisableTorchFunctionSubclass())
                try:
                    self._finish(index, members)
                except BaseException:
                    self._open[index] = members
                    raise

    def _step_meanwhile(self, index: int) -> None:
        """Before a reader waits for its message, make the steps of messages that have come."""
        assert self._engine is not None
        if self._stream.on_device:
            return  # to wait for a sum does not block this thread there
        for other in list(self._open):
            # Completing another message may have completed all, and changed the engine.
            if index not in self._open or self._engine.has_come(index):
                return
            if other != index and self._engine.has_come(other) and self._may_step(other):
                self.complete(other)

    def _may_step(self, index: int) -> bool:
        """Whether a message is still open, and its steps were called and may be made before their turn."""
        dues = map(due_of, self._open.get(index, ()))
        steps = [None if due is None else due.step for due in dues]
        return index in self._open and all(step is not None and step.in_any_order for step in steps)

    def _finish(self, index: int, members: list[nn.Parameter]) -> None:
        assert self._engine is not None
        try:
            # The engine makes gradients like parameters, and reads no value of them.
            with self._unchecked():
                self._engine.finish_message(index)
        except Exception as error:  # after a Ctrl-C, readers may try again
            self.fail("the gradients of the last step could not be summed", error)
            raise
        members, self._released = [*members, *self._released], []
        try:
            _apply([(parameter, due) for parameter in members if (due := due_of(parameter)) is not None])
        except BaseException as error:  # some of the parameters may have been stepped
            self.fail("the optimizer's last step could not be made", error)
            raise
        for parameter in members:
            unmark(parameter)

    @contextmanager
    def _unchecked(self) -> Iterator[None]:
        """A context in which `StaleReads`, if reads are checked, lets all pass."""
        if self._reads is None:
            yield
            return
        self._reads.paused = True
        try:
            yield
        finally:
            self._reads.paused = False

    def fail(self, what: str, error: BaseException) -> None:
        """Let all later readers fail, because parameters that are due will get no value."""
        if isinstance(error, ExchangeError):
            self.failure = error
        else:
            self.failure = ExchangeError(
                f"parameters have no value, because {what} ({type(error).__name__}: {error}); resume from a checkpoint"
            )

    def defer(self, parameter: nn.Parameter, step: DeferredStep) -> bool:
        """See `Owner.defer`."""
        with self._lock:
            due = due_of(parameter)
            if due is not None:
                due.step = step
            return due is not None

    def begin_step(self) -> None:
        """See `Owner.begin_step`."""
        self._stream.follow()

    def begin_pass(self) -> None:
        """Note that a synchronized pass begins; all ranks call it before the same passes."""
        self._launched = None

    def clip_by_norm(
        self, parameters: Sequence[nn.Parameter], max_norm: float, error_if_nonfinite: bool = False
    ) -> Tensor | None:
        """Clip gradients by their 2-norm like ``torch.nn.utils.clip_grad_norm_``, without waiting for all sums.

        Collective: all ranks call it after the same passes, with the same parameters. The norms come from the roots of
        the sums (see `gradient_norms`), so they are PyTorch's to floating-point order. Gradients are multiplied when
        they have come.

        Returns:
            The norm of all gradients. None, on every rank, if the gradients must come first: the last pass did not
            overlap, no message has roots, or some rank has read or clipped a gradient since.

        Raises:
            ExchangeError: a peer was lost or did not answer in time.
            RuntimeError: the norm is not finite, with ``error_if_nonfinite``.
        """
        with self._lock, torch.no_grad():
            self._stream.follow()
            launched = self._launched
            return None if launched is None else launched.clip_by_norm(parameters, max_norm, error_if_nonfinite)

    def unscale_later(self, parameters: Sequence[nn.Parameter], inverse: Tensor) -> set[nn.Parameter]:
        """Let gradients be multiplied when they have come, like ``torch.amp.GradScaler.unscale_``, if all are finite.

        Collective: all ranks call it after the same passes, with the same parameters. It waits until all sums have come
        up their trees.

        Args:
            parameters: the parameters of one optimizer.
            inverse: [] float32, the inverse of the loss scale.

        Returns:
            The parameters whose gradients are multiplied later; the others' have come, or are not of this module. It is
            empty, on every rank, if the caller must read all gradients: some gradient of those under way is not finite
            (or so large that their norm is not), the optimizer lacks parameters of the last pass, some are in fp16 or
            complex or not on a CPU, or `clip_by_norm` would return None.

        Raises:
            ExchangeError: a peer was lost or did not answer in time.
        """
        with self._lock, torch.no_grad():
            self._stream.follow()
            return set() if self._launched is None else self._launched.unscale_later(parameters, inverse)

    def notice_change(self) -> None:
        """Complete the first message, which tells whether some rank's parameters changed before the last pass.

        Call this before a collective call: a rank whose parameters changed has already begun to compare them.
        """
        with self._lock:
            if self._open:
                self.complete(min(self._open))

    def release(self) -> None:
        """Complete all parameters together with the message that is being completed.

        The engine's caller needs this when it exchanges all gradients of a pass again.
        """
        self._released = [parameter for members in self._open.values() for parameter in members]
        self._open.clear()
        if self._launched is not None:
            self._launched.end()

    def note_reader(self, reader: str) -> None:
        """See `Owner.note_reader`."""
        if self._on_wait is not None and reader not in self._readers and len(self._readers) < _MOST_READERS:
            self._readers.add(reader)
            self._on_wait(reader)

    def close(self) -> None:
        """Settle, and stop deferring steps. After a failure, parameters without a value raise when they are read."""
        try:
            with suppress(ExchangeError):  # kept for the readers
                self.settle()
        finally:
            if self._open and self.failure is None:
                self.failure = ExchangeError("parameters have no value: their sums were not awaited before the end")
            atexit.unregister(self._end_with_process)
            for handle in self._hooks:
                handle.remove()
            self._checking.close()
            if self._engine is not None:
                self._engine.on_launch = self._engine.before_pass = None
                self._engine = None

    def _end_with_process(self) -> None:
        """Settle at the end of a script, because other ranks need this rank for the sums under way."""
        error = getattr(sys, "last_value", None)  # that ended the script
        if error is None and self.failure is None:
            self.settle()

    def _begin(self) -> None:
        """Mark the parameters of all messages that are under way at the end of a backward pass."""
        engine = self._engine
        assert engine is not None
        members = {index: [each for each in engine.members(index) if each.requires_grad] for index in engine.pending}
        for index, parameters in members.items():
            if any(type(each) is not nn.Parameter for each in parameters):
                engine.finish_message(index)
        self._stream.follow()
        if engine.pending:
            self._launched = LaunchedGradients(engine, {index: members[index] for index in engine.pending}, self)
        for index in engine.pending:
            self._open[index] = members[index]
            for each in members[index]:
                mark(each, Due(self, index))


def defer_steps(optimizer: Optimizer, check_reads: bool = False) -> str:
    """Let the steps of an optimizer leave out parameters that are due; these are made when the parameters are read.

    Args:
        optimizer: the optimizer.
        check_reads: whether to find readers of the optimizer's ``state`` while steps are due; see `StaleStates`.

    Returns:
        The reason why this cannot be done; empty if it is done. Steps then wait for all sums.
    """
    reason = why_whole(optimizer)
    if reason or optimizer in _deferring:
        return reason
    _deferring[optimizer] = optimizer.register_step_pre_hook(_before_step)
    # Before the user's hooks, so that these find the steps due.
    first = optimizer.register_step_post_hook(_after_step)
    cast(Any, optimizer)._optimizer_step_post_hooks.move_to_end(first.id, last=False)
    optimizer.register_state_dict_pre_hook(_complete_all)
    optimizer.register_load_state_dict_pre_hook(_complete_all)
    if check_reads:
        _check_state(optimizer)
        optimizer.register_load_state_dict_post_hook(_check_state)
    return ""


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let a part of the optimizer make the step: a copy that lacks the parameters that are due.

    Other pre-hooks that follow would see the part, so all parameters are then completed instead.
    """
    whole = hooks_would_see_parts(optimizer, _before_step)
    closure: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None and (whole or not _has_due(optimizer)):
        _complete_all(optimizer)
        return None
    part = optimizer if whole else part_of(optimizer, [dict(group) for group in optimizer.param_groups])
    if closure is None:
        _take(optimizer, part)
        return (part, *args[1:]), kwargs

    def closure_first() -> Any:
        result = closure()
        if whole:
            _complete_all(optimizer)
        else:
            _take(optimizer, part)
        return result

    return (part, *args[2:]), {**kwargs, "closure": closure_first}


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], _: Any) -> None:
    # Last again, where the user has registered others.
    cast(Any, optimizer)._optimizer_step_pre_hooks.move_to_end(_deferring[optimizer].id)
    part = args[0]
    if part is optimizer:
        return
    late: list[tuple[nn.Parameter, DeferredStep]] = []
    for taken in vars(part).pop(_TAKEN, []):
        for parameter in taken.due:
            due = due_of(parameter)
            if due is None or not due.owner.defer(parameter, taken.step):  # its gradient was read in the meantime
                late.append((parameter, taken.step))
    take_over(optimizer, part)
    make_steps(late)


def _has_due(optimizer: Optimizer) -> bool:
    return any(due_of(parameter) is not None for group in optimizer.param_groups for parameter in group["params"])


def _take(optimizer: Optimizer, part: Optimizer) -> None:
    """Take the parameters that are due out of the groups of a part of the optimizer."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (due := due_of(parameter)) is not None and due.step is not None:  # a second step with this gradient
                due.owner.complete(due.message)
    found = vars(part)[_TAKEN] = []
    for group, partial in zip(optimizer.param_groups, part.param_groups, strict=True):
        dues = {parameter: due for parameter in group["params"] if (due := due_of(parameter)) is not None}
        for owner in {due.owner for due in dues.values()}:
            owner.begin_step()
        due_ones = list(dues)
        found.append(_Taken(due_ones, DeferredStep(optimizer, group)))
        left_out = set(due_ones)
        partial.update({**group, "params": [each for each in group["params"] if each not in left_out]})


def _complete_all(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (due := due_of(parameter)) is not None:
                due.owner.complete(due.message)


def _check_state(optimizer: Optimizer) -> None:
    optimizer.state = StaleStates(dict, optimizer.state)


def _before_forward(module: nn.Module, _: Any) -> None:
    if torch.compiler.is_compiling():
        return
    # Modules of PyTorch have faster paths without gradients, for plain parameters of all their parts.
    slow = module.training and torch.is_grad_enabled()
    for parameter in module._parameters.values() if slow else module.parameters():
        due = due_of(parameter)
        if due is not None and due.step is not None:
            due.owner.complete(due.message)


def _apply(due: list[tuple[nn.Parameter, Due]]) -> None:
    for _, what in due:
        what.stepping = True
    change_gradients(due)
    make_steps([(parameter, what.step) for parameter, what in due if what.step is not None])
    for parameter, what in due:
        if what.clears and what.step is not None:
            if parameter.grad is not None:
                keep(parameter.grad)
            parameter.grad = None
        elif what.clears is False and parameter.grad is not None:
            parameter.grad.zero_()
