"""The engine: it replaces gradients with their mean over ranks while backward is still running."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine.accumulator_hooks import AccumulatorHooks
from lightning_autosync.engine.compressor_state import ParameterStates, check_scale
from lightning_autosync.engine.connections import CONNECT_TIMEOUT
from lightning_autosync.engine.end_of_backward import call_after_backward
from lightning_autosync.engine.exchanges.base import Exchange
from lightning_autosync.engine.gradients import MessageGradients
from lightning_autosync.engine.norms import gradient_norms
from lightning_autosync.engine.notes import Notes
from lightning_autosync.engine.profiling import profiled
from lightning_autosync.engine.resources import Resources
from lightning_autosync.engine.start_order import StartOrder
from lightning_autosync.engine.static_graph import StaticGraph
from lightning_autosync.engine.tracing import Recorder
from lightning_autosync.engine.waiting import announce
from lightning_autosync.errors import ExchangeError
from lightning_autosync.plan.schedule import Schedule

Waits = Literal["backward", "parameters"]
_numbers = count()


class Engine:
    """Executes a synchronous `Schedule` for the gradients of a set of parameters.

    A message starts when the last of its gradients is ready. Messages on trees start at once; collectives start in
    schedule order, which must be the same on every rank. Gradients are divided by the number of ranks before they
    are summed, so what appears in ``parameter.grad`` is DDP's mean. As in DDP, hooks that users register on gradients
    run before the engine reads them.

    One backward pass may reach the parameters of several engines, in different orders on different ranks. At its end
    the engines wait for other ranks one after the other, in the order in which they were made.

    Args:
        parameters: names and parameters, as in ``named_parameters()``; they include every variable of the schedule.
        schedule: the messages to exchange; the same on every rank.
        group: the process group; None is the default group.
        cluster: addresses of the nodes and known rates of the links between ranks. Without it, ranks listen on the
            address that faces the rendezvous.
        timeout: seconds to wait for other ranks before an `ExchangeError`.
        waits: when to wait for messages. ``backward``: at the end of the backward pass. ``parameters``: when the caller
            asks for a message, before it uses the parameters again. Communication then overlaps with the next forward
            pass (see `finish_message`, `StepOverlap`).
        gradient_as_bucket_view: as in ``DistributedDataParallel``: whether gradients become views of the engine's
            buffers, which saves memory. By default ``parameter.grad`` stays the user's own tensor.
        static_graph: as in ``DistributedDataParallel``: whether every backward pass accumulates each gradient as often
            as the first one did. A module may then run several times under reentrant checkpointing.
        watched: whether the caller has a `FailureDetector` open for all ranks; otherwise the engine opens one.
        connect_timeout: seconds in which all ranks must connect; never more than ``timeout``.
        notes: numbers of each rank that may travel with the gradients; see `notes`.
        resources: opened before, for the same parameters and schedule and with the same settings, such as on another
            thread during earlier steps; None opens them now.

    Attributes:
        schedule: the messages that are exchanged.
        waits: see above; an engine made with ``parameters`` may wait at the end of some passes.
        enabled: whether backward passes synchronize; off while gradients are accumulated locally.
        expects: whether the next backward pass may begin to synchronize; callers turn it off for passes of one rank.
        deferred: whether the caller runs `finish` after each backward pass, also one that reaches no parameter;
            otherwise the engine does when autograd is done.
        changed: whether this rank's parameters are no longer those that the ranks agreed on. The next backward pass
            then tells the other ranks.
        on_begin: called on every rank at the first gradient of a synchronized pass, unless `deferred`. It may set
            ``changed``; errors that it raises end the backward pass.
        on_change: called on every rank, with the last sum of a pass in which some rank had ``changed`` set.
        on_pass: called on every rank, with the last sum of every other synchronized pass.
        on_backward: called on this rank at the end of a synchronized backward pass, before it waits for other ranks.
        on_launch: called when a backward pass ends without waiting, with all its messages under way.
        before_pass: called before a backward pass adds to the gradients of messages under way; it finishes them.

    Raises:
        PlanError: the schedule does not fit the parameters or the number of ranks, or differs between ranks.
        OpeningError: (on every rank) ranks cannot connect to each other, or a rank has no memory for the buffers.
        ExchangeError: a rank is lost.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        schedule: Schedule,
        *,
        group: dist.ProcessGroup | None = None,
        cluster: ClusterSpec | None = None,
        timeout: float = 1800.0,
        waits: Waits = "backward",
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        watched: bool = False,
        connect_timeout: float = CONNECT_TIMEOUT,
        notes: int = 0,
        resources: Resources | None = None,
    ) -> None:
        if waits not in ("backward", "parameters"):
            raise ValueError(f"waits: {waits!r} is not known; allowed: 'backward' or 'parameters'")
        self.schedule = schedule
        self._number = next(_numbers)  # engines are made collectively, so their order is the same on all ranks
        self.waits = waits
        self._overlaps = waits == "parameters"
        self.enabled = self.expects = True
        self.deferred = self.changed = False
        self.on_begin: Callable[[], None] | None = None
        self.on_change: Callable[[], None] | None = None
        self.on_pass: Callable[[], None] | None = None
        self.on_backward: Callable[[], None] | None = None
        self.on_launch: Callable[[], None] | None = None
        self.before_pass: Callable[[], None] | None = None
        self._armed = self._unended = self._change_seen = False
        self._interruption = ""
        self._recorder: Recorder | None = None
        self._timer: Callable[[int, int], None] | None = None
        self._pending: dict[int, MessageGradients] = {}
        self._finite = True
        self._watches_changes = False
        self._on_accelerator = any(parameter.device.type != "cpu" for _, parameter in parameters)
        self._loss_scale: float | None = None
        views = gradient_as_bucket_view
        self._resources = resources or Resources(
            dict(parameters), schedule, group, cluster, timeout, views, watched, connect_timeout, notes=notes
        )
        self._gradients = self._resources.gradients
        self._order = StartOrder(self._gradients)
        self._compressor_state = self._resources.compressor_state
        self._graph = StaticGraph(self._gradients) if static_graph else None
        self._hooks = AccumulatorHooks()
        self.renew_hooks()

    def renew_hooks(self, also: Iterable[nn.Parameter] = ()) -> None:
        """Register the hooks again, after a parameter changed its dtype: its autograd node is then another one.

        Do not call this during a backward pass.

        Args:
            also: parameters outside the schedule. This rank takes part in the exchange after a backward pass that
                reaches one of them, even if the pass reaches no parameter of the schedule.
        """
        self._hooks.remove()
        # Before a gradient is added to the last pass's, also where this pass only accumulates.
        before = self._finish_last if self._overlaps else None
        known = {parameter for gradients in self._gradients for parameter in gradients.parameters}
        for parameter in also:
            if parameter not in known:
                self._hooks.add(parameter, self._arm_once, before)
        for gradients in self._gradients:
            for place, parameter in enumerate(gradients.parameters):
                self._hooks.add(parameter, self._hook(gradients, place), before)

    def finish(self) -> None:
        """Wait until every gradient of this backward pass holds the mean over ranks.

        Incomplete messages are sent now, with zeros for missing gradients. Parameters that got no gradient on any rank
        keep the gradient that they had.

        Raises:
            ExchangeError: a peer was lost or did not answer in time.
        """
        self._take_part()
        self.launch()
        for index in list(self._pending):
            self.finish_message(index)
        self._end_pass()

    def end_backward(self) -> None:
        """End a backward pass: wait for its sums, or leave them under way if `waits` says so and nothing has changed.

        Raises:
            ExchangeError: a peer was lost or did not answer in time.
        """
        self._take_part()
        if self.waits == "backward" or self.changed or not self._armed:
            self.finish()
            return
        self.launch()
        if not self._pending:
            self._end_pass()
        elif self.on_launch is not None:
            if self._recorder is not None and not any(each.waits_in_backward for each in self.schedule.messages):
                self._recorder.overlap()
            self.on_launch()

    def synchronize(self) -> None:
        """Average the current gradients over ranks, without a backward pass.

        Raises:
            ExchangeError: a peer was lost or did not answer in time.
        """
        deferred, self.deferred = self.deferred, True
        try:
            self._arm()
            self.finish()
        finally:
            self.deferred = deferred

    def launch(self) -> None:
        """Start all messages of this backward pass that have not started, without waiting for sums.

        Messages of PowerSGD are complete afterwards, because their second round needs the sum of the first.

        Raises:
            ExchangeError: a peer was lost or did not answer in time.
        """
        if not self._armed:
            return
        self._armed = False
        self._finite = True
        if self.on_backward is not None:
            self.on_backward()
        recorder = self._recorder
        if recorder is not None:
            recorder.end_backward()
            recorder.begin_wait()
        if self._graph is not None:
            self._graph.end_pass()
        self._pending = {gradients.message.index: gradients for gradients in self._gradients if gradients.active}
        for gradients in self._pending.values():
            if not gradients.started:
                self._start(gradients)
        # A second loop, because `resume` may block: by then every message is under way.
        for gradients in self._pending.values():
            gradients.resume()
        for index, gradients in list(self._pending.items()):
            if len(gradients.message.rounds) > 1:
                self.finish_message(index)
        if recorder is not None:
            recorder.end_wait()

    def finish_message(self, index: int) -> None:
        """Wait until the gradients of one message hold the mean over ranks; does nothing if they already do.

        Messages may be finished in any order, even in different orders on different ranks.

        Args:
            index: index of the message in the schedule.

        Raises:
            ExchangeError: a peer was lost or did not answer in time.
        """
        if index not in self._pending:
            return
        self._finish_one(index)
        if self._change_seen:  # the gradients of the whole pass are going to change
            for other in list(self._pending):
                self._finish_one(other)
        if not self._pending and not self._armed:
            self._end_pass()

    def has_come(self, index: int) -> bool:
        """Whether `finish_message` would not wait for other ranks; False if that is not known."""
        return self._gradients[index].exchange.has_come

    def has_roots(self, index: int) -> bool:
        """Whether ranks have parts of a message's sum before it is finished; the same on every rank."""
        return self._gradients[index].has_roots

    def norms(self, indices: Sequence[int], refuses: bool) -> list[Tensor] | None:
        """See `gradient_norms`; the messages with these indices are not finished by that."""
        messages = [self._gradients[index] for index in indices]
        if self._recorder is None:
            return gradient_norms(messages, refuses, self._resources.group)
        self._recorder.begin_wait()
        found = gradient_norms(messages, refuses, self._resources.group)
        self._recorder.end_wait()
        return found

    def send_sums_first(self, indices: Sequence[int]) -> None:
        """Let contributions to the sums of these messages, from now on, leave before all sums that are complete."""
        for index in indices:
            exchange = self._gradients[index].exchange
            assert isinstance(exchange, Exchange)  # messages of rows have no roots
            exchange.send_sums_first()

    def members(self, index: int) -> list[nn.Parameter]:
        """The parameters of a message."""
        return self._gradients[index].parameters

    def _finish_one(self, index: int) -> None:
        gradients, recorder = self._pending[index], self._recorder
        if recorder is not None:
            recorder.begin_wait()
        gradients.finish()
        if recorder is not None:
            recorder.end_wait()
        del self._pending[index]
        if self._watches_changes:
            self._change_seen = self._change_seen or gradients.change_seen
        if recorder is not None:
            recorder.finish(index)
        if self._loss_scale is not None and self._compressor_state.has_residuals:
            self._finite = self._finite and gradients.finite()
        if not self._pending:
            self._settle()

    @property
    def pending(self) -> tuple[int, ...]:
        """Indices of the messages of the last backward pass that are not finished."""
        return tuple(self._pending)

    def trace(self, recorder: Recorder | None) -> None:
        """Let ``recorder`` time all steps from now on; None stops that. Do not call this during a backward pass."""
        self._recorder = recorder
        self._timer = recorder.arrive if recorder is not None and recorder.times_gradients else None
        complete = None if recorder is None or not recorder.watches else recorder.complete
        for gradients in self._gradients:
            gradients.watch(None if complete is None else partial(complete, gradients.message.index))

    @property
    def in_pass(self) -> bool:
        """Whether a synchronized backward pass has begun on this rank, and has not ended."""
        return self._armed

    def refuse_unended(self) -> None:
        """Check, before a forward pass, that the last backward pass was not ended by an error that the user caught.

        Raises:
            ExchangeError: it was; see `interrupt`.
        """
        inside = torch._C._current_graph_task_id() != -1  # a checkpoint may run the forward pass again
        if self._armed and not self.deferred and not inside:
            self._interruption = self._interruption or "its error was caught"
            self._refuse_interrupted()

    def interrupt(self, cause: BaseException) -> None:
        """Report that a backward pass ended with an error. Later passes raise, because messages are incomplete."""
        self._interruption = f"{type(cause).__name__}: {cause}"
        announce(cause)

    @property
    def notes(self) -> Notes | None:
        """Numbers that travel with the gradients of each pass; None if no message of the schedule can carry them."""
        return self._resources.notes

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent over the engine's own connections, without the backend's collectives."""
        return self._resources.bytes_sent

    @property
    def loss_scale(self) -> float | None:
        """The factor by which the loss of the next backward pass is scaled; None if it is not scaled.

        A gradient scaler sets this before each backward pass. Error feedback then rescales its residuals. It also
        undoes steps with gradients that are not finite, which the scaler skips. All ranks see the same sums, so all
        take the same decision.

        Raises:
            ValueError: (when set) the factor is not a positive number.
        """
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float | None) -> None:
        self._loss_scale = None if scale is None else check_scale(scale)

    @property
    def has_residuals(self) -> bool:
        """Whether some message uses error feedback, which needs `loss_scale`."""
        return self._compressor_state.has_residuals

    def state_dict(self) -> ParameterStates:
        """The compressors' state by parameter, converted to gradients of an unscaled loss."""
        return self._compressor_state.state_dict()

    def load_state_dict(self, state: ParameterStates) -> list[str]:
        """Load a state that `state_dict` returned on this rank, under this plan or another.

        Returns:
            The parameters whose state was not loaded, because they are in no message or have another compressor.
        """
        return self._compressor_state.load_state_dict(state)

    def close(self) -> None:
        """Remove the hooks and close the connections; gradients keep their values."""
        self.release().close()

    def release(self) -> Resources:
        """Remove the hooks; returns what is left to be closed, which may be done on any thread."""
        self._hooks.remove()
        return self._resources

    def _hook(self, gradients: MessageGradients, place: int) -> Callable[..., None]:
        arrive, graph, message = gradients.on_arrival(place), self._graph, gradients.message.index

        def on_gradient(*_: object) -> None:
            if not self.enabled:
                return
            if not self._armed or self._interruption:
                if not self.expects:
                    return
                self._arm()
            if graph is not None and not graph.arrived(gradients, place):
                return
            if self._timer is not None:
                self._timer(message, place)
            arrive()
            gradients.missing -= 1
            if gradients.missing == 0:
                self._complete(gradients)

        return on_gradient

    def _arm_once(self, *_: object) -> None:
        if self.enabled and self.expects and not self._armed:
            self._arm()

    def _take_part(self) -> None:
        """Begin a pass without a gradient on this rank, if the other ranks wait for its messages."""
        if self.enabled and not self._armed and (self.deferred or self.changed):
            self._arm()

    def _refuse_interrupted(self) -> None:
        if self._interruption:
            raise ExchangeError(
                f"an earlier backward pass failed on this rank ({self._interruption}). Other ranks may still be in "
                "that pass: resume from a checkpoint"
            )

    def _arm(self) -> None:
        self._refuse_interrupted()
        self._finish_last()
        if self.on_begin is not None and not self.deferred:
            self.on_begin()
        if self._compressor_state.has_residuals:
            self._compressor_state.begin_step(self._loss_scale)
        self._armed = self._unended = True
        self._order.begin_pass()
        if self._recorder is not None:
            self._recorder.end_forward()
        self._change_seen = False
        for gradients in self._gradients:
            gradients.arm(self.changed)
        # Reading the sum would block on an accelerator, so there only a rank with changed parameters reads it.
        self._watches_changes = self.on_change is not None and (self.changed or not self._on_accelerator)
        if self._graph is not None:
            self._graph.begin_pass()
        if not self.deferred:
            call_after_backward(self.end_backward, self._number)

    def _complete(self, gradients: MessageGradients) -> None:
        if self._recorder is not None:
            self._recorder.ready(gradients.message.index)
        for following in self._order.complete(gradients):
            self._start(following)

    def _finish_last(self, *_: object) -> None:
        """Finish messages of the last pass; they use the gradients, and the buffers into which a pass packs them."""
        if self._pending and not self._armed:
            if self.before_pass is not None:
                self.before_pass()
            for index in list(self._pending):
                self.finish_message(index)

    def _end_pass(self) -> None:
        """Tell the caller, once, that the last pass has all its sums."""
        if not self._unended:
            return
        self._unended = False
        if self._change_seen:
            self._change_seen = False
            if self.on_change is not None:
                self.on_change()
        elif self.on_pass is not None:
            self.on_pass()

    def _settle(self) -> None:
        """Note the end of a pass, after its last message."""
        if not self._finite:
            self._compressor_state.undo_step()
        if self._recorder is not None:
            self._recorder.end_synchronization()

    def _start(self, gradients: MessageGradients) -> None:
        if self._recorder is not None:
            self._recorder.start(gradients.message.index)
        with profiled(gradients.message.name, "launch"):
            gradients.start()
