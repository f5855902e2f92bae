"""The engine: gradients in, their mean over ranks out, while backward is still running."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import ExchangeError
from lightning_autosync.plan.schedule import Schedule
from lightning_autosync.runtime.assembly import Assembly
from lightning_autosync.runtime.buckets import Bucket
from lightning_autosync.runtime.memories import CompressorMemory, Memories, check_scale
from lightning_autosync.runtime.tracing import Recorder

Waits = Literal["backward", "parameters"]


class Engine:
    """Executes a synchronous `Schedule` for the gradients of a set of parameters.

    A message starts when the last of its gradients is ready. Messages on trees start at once; collectives start in
    schedule order, which must be the same on every rank. Gradients are divided by the number of ranks before they
    are summed, so what appears in ``parameter.grad`` is DDP's mean.

    Args:
        parameters: name and parameter, as in ``named_parameters()``; each variable of the schedule must be there.
        schedule: what to exchange; the same on every rank.
        group: the process group; None is the default one.
        cluster: addresses to listen on and the rates of the links between ranks, as far as known; without it, ranks
            listen on the address that faces the rendezvous.
        timeout: seconds to wait for other ranks before an `ExchangeError`.
        waits: when messages are waited for: at the end of ``backward``, or by the caller, before ``parameters`` are
            used again, so that they travel beside the next forward pass (see `finish_message`, `GroupedOptimizer`).

    Attributes:
        schedule: what is exchanged.
        enabled: whether backward passes synchronize; off while gradients are accumulated locally.
        deferred: whether the caller runs `finish` after backward; else the engine does so when autograd is done.

    Raises:
        PlanError: the schedule is for other parameters or another number of ranks, or differs between ranks.
        ExchangeError: ranks cannot connect to each other.
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
    ) -> None:
        if waits not in ("backward", "parameters"):
            raise ValueError(f"waits: {waits!r} is not known; allowed: 'backward' or 'parameters'")
        self.schedule = schedule
        self.enabled = True
        self.deferred = False
        self._armed = False
        self._interruption = ""
        self._next = 0
        self._recorder: Recorder | None = None
        self._pending: dict[int, Bucket] = {}
        self._finite = True
        self._loss_scale: float | None = None
        self._end_of_backward = self.finish if waits == "backward" else self.launch
        self._assembly = Assembly(dict(parameters), schedule, group, cluster, timeout)
        self._buckets = self._assembly.buckets
        self._memory = CompressorMemory(
            [(bucket.message, bucket.parameters) for bucket in self._buckets], self._assembly.memories()
        )
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(bucket, place))
            for bucket in self._buckets
            for place, parameter in enumerate(bucket.parameters)
        ]

    def finish(self) -> None:
        """Wait until every gradient of this backward pass holds the mean over ranks.

        Messages whose gradients did not all come are sent now, with zeros for the missing ones; parameters that got
        no gradient on any rank keep what they had.

        Raises:
            ExchangeError: a peer was lost or did not answer in time.
        """
        self.launch()
        for index in list(self._pending):
            self.finish_message(index)

    def launch(self) -> None:
        """Send what is left of this backward pass, without waiting for sums.

        PowerSGD's messages are complete afterwards: their second round begins when the first one is waited for.

        Raises:
            ExchangeError: a peer was lost or did not answer in time.
        """
        if not self._armed:
            return
        self._armed = False
        self._finite = True
        if self._recorder is not None:
            self._recorder.end_backward()
        self._pending = {bucket.message.index: bucket for bucket in self._buckets if bucket.active}
        for bucket in self._pending.values():
            if not bucket.started:
                self._start(bucket)
        for bucket in self._pending.values():
            bucket.resume()
        for index, bucket in list(self._pending.items()):
            if len(bucket.message.rounds) > 1:
                self.finish_message(index)

    def finish_message(self, index: int) -> None:
        """Wait until the gradients of one message hold the mean over ranks; does nothing if they do already.

        Messages may be finished in any order, in another one on each rank.

        Args:
            index: of the message in the schedule.

        Raises:
            ExchangeError: a peer was lost or did not answer in time.
        """
        bucket = self._pending.get(index)
        if bucket is None:
            return
        bucket.finish()
        del self._pending[index]
        if self._recorder is not None:
            self._recorder.finish(index)
        if self._loss_scale is not None and self._memory.has_residuals:
            self._finite = self._finite and bucket.finite()
        if not self._pending:
            self._settle()

    @property
    def pending(self) -> tuple[int, ...]:
        """Messages of the last backward pass, by index, that nobody has waited for yet."""
        return tuple(self._pending)

    def trace(self, recorder: Recorder | None) -> None:
        """Have ``recorder`` take the times of all steps from now on; None ends that. Not during a backward pass."""
        self._recorder = recorder
        for bucket in self._buckets:
            bucket.watch(None if recorder is None else recorder.completion(bucket.message.index))

    def interrupt(self, cause: BaseException) -> None:
        """A backward pass ended with an error on this rank: what its messages hold is unknown, so none can follow."""
        self._interruption = f"{type(cause).__name__}: {cause}"

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent on its own connections; collectives are the backend's and not in it."""
        return self._assembly.bytes_sent

    @property
    def loss_scale(self) -> float | None:
        """By what the loss is multiplied before backward; None if nobody scales it.

        Who scales it sets this before each backward pass. Error feedback carries what was lost from one step to the
        next, so it follows the scale; and a step whose gradients are not finite, which a gradient scaler skips,
        leaves no trace in it. All ranks see the same sums, so all decide alike.

        Raises:
            ValueError: (when set) it is not a positive number.
        """
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float | None) -> None:
        self._loss_scale = None if scale is None else check_scale(scale)

    @property
    def has_residuals(self) -> bool:
        """Whether error feedback is at work, so that `loss_scale` matters."""
        return self._memory.has_residuals

    def state_dict(self) -> Memories:
        """What compressors remember, by variable, for gradients of a loss that is not scaled."""
        return self._memory.state_dict()

    def load_state_dict(self, state: Memories) -> list[str]:
        """Take up what `state_dict` returned on this rank, under this plan or another.

        Returns:
            The variables whose memory has no place here: they are in no message, or their compressor is another.
        """
        return self._memory.load_state_dict(state)

    def close(self) -> None:
        """Remove the hooks and close the connections; gradients stay as they are."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._assembly.close()

    def _hook(self, bucket: Bucket, place: int) -> Callable[[Tensor], None]:
        pack = bucket.packer(place)

        def on_gradient(_: Tensor) -> None:
            if not self.enabled:
                return
            if not self._armed or self._interruption:
                self._arm()
            pack()
            bucket.missing -= 1
            if bucket.missing == 0:
                self._complete(bucket)

        return on_gradient

    def _arm(self) -> None:
        if self._interruption:
            raise ExchangeError(
                f"an earlier backward pass ended with an error on this rank ({self._interruption}); the other ranks "
                "may be in the middle of it: start again from a checkpoint"
            )
        for index in list(self._pending):
            self.finish_message(index)
        if self._memory.has_residuals:
            self._memory.begin_step(self._loss_scale)
        self._armed = True
        self._next = 0
        if self._recorder is not None:
            self._recorder.end_forward()
        for bucket in self._buckets:
            bucket.arm()
        if not self.deferred:
            Variable._execution_engine.queue_callback(self._end_of_backward)

    def _complete(self, bucket: Bucket) -> None:
        if self._recorder is not None:
            self._recorder.ready(bucket.message.index)
        if not bucket.message.collective:
            self._start(bucket)
            return
        while self._next < len(self._buckets):
            following = self._buckets[self._next]
            if following.message.collective and following.active:
                if following.missing:
                    return
                self._start(following)
            self._next += 1

    def _settle(self) -> None:
        """The last message of a pass is complete."""
        if not self._finite:
            self._memory.undo_step()
        if self._recorder is not None:
            self._recorder.end_synchronization()

    def _start(self, bucket: Bucket) -> None:
        if self._recorder is not None:
            self._recorder.start(bucket.message.index)
        bucket.start()
