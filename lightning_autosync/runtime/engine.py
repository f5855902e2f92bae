"""The engine: gradients in, their mean over ranks out, while backward is still running."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import ExchangeError
from lightning_autosync.plan.schedule import Schedule
from lightning_autosync.runtime.assembly import Assembly
from lightning_autosync.runtime.buckets import Bucket


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

    Attributes:
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
    ) -> None:
        self.schedule = schedule
        self.enabled = True
        self.deferred = False
        self._armed = False
        self._interruption = ""
        self._next = 0
        self._assembly = Assembly(dict(parameters), schedule, group, cluster, timeout)
        self._buckets = self._assembly.buckets
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
        if not self._armed:
            return
        self._armed = False
        buckets = [bucket for bucket in self._buckets if bucket.active]
        for bucket in buckets:
            if not bucket.started:
                bucket.start()
        for bucket in buckets:
            bucket.resume()
        for bucket in buckets:
            bucket.finish()

    def interrupt(self, cause: BaseException) -> None:
        """A backward pass ended with an error on this rank: what its messages hold is unknown, so none can follow."""
        self._interruption = f"{type(cause).__name__}: {cause}"

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent on its own connections; collectives are the backend's and not in it."""
        return self._assembly.bytes_sent

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """What compressors remember, by message: ``residual`` (this rank's own) and PowerSGD's ``factors``."""
        return {
            name: {key: tensor.clone() for key, tensor in tensors.items()}
            for name, tensors in self._assembly.memories().items()
        }

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Restore what `state_dict` returned on this rank under the same plan.

        Raises:
            ValueError: the state has other messages or sizes.
        """
        memories = self._assembly.memories()
        if state.keys() != memories.keys():
            raise ValueError(f"compressor state is for messages {sorted(state)}, the plan has {sorted(memories)}")
        for name, tensors in memories.items():
            for key, tensor in tensors.items():
                if key not in state[name] or state[name][key].shape != tensor.shape:
                    raise ValueError(f"compressor state of message '{name}': '{key}' does not fit the plan")
        for name, tensors in memories.items():
            for key, tensor in tensors.items():
                tensor.copy_(state[name][key])

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
        self._armed = True
        self._next = 0
        for bucket in self._buckets:
            bucket.arm()
        if not self.deferred:
            Variable._execution_engine.queue_callback(self.finish)

    def _complete(self, bucket: Bucket) -> None:
        if not bucket.message.collective:
            bucket.start()
            return
        while self._next < len(self._buckets):
            following = self._buckets[self._next]
            if following.message.collective and following.active:
                if following.missing:
                    return
                following.start()
            self._next += 1
