"""The interface between a training loop and relaxed synchronization."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.optim import Optimizer

from lightning_autosync.engine.profiling import profiled


class Drain(NamedTuple):
    """A barrier of all live workers.

    Attributes:
        number: unique number of the drain within this training; later drains have larger ones.
        starts: how often each worker at the drain has started, by rank. It tells a worker that returned after a loss
            from the earlier process.
    """

    number: int
    starts: dict[int, int]


class Synchronizer(ABC):
    """One worker's side of relaxed synchronization.

    The training loop calls, in this order::

        start()  (step()*  finish()?  drain()  resume())*  close()

    Between two drains, workers may take different numbers of steps. Every method raises
    :class:`~lightning_autosync.errors.ExchangeError` within a bounded time if the coordinating process is lost.
    """

    @abstractmethod
    def start(self) -> None:
        """Begin with rank 0's tensors; every live worker must call this.

        A worker that returns to a running job takes the tensors of a live peer instead. Where optimizers step on the
        workers, its first step continues from the state of that peer's optimizer.
        """

    @abstractmethod
    def step(self, optimizer: Optimizer, samples: int) -> None:
        """Apply the gradients of the local mini-batch, which must be final (accumulated, unscaled, clipped).

        Partial reduce and periodic averaging call ``optimizer.step()``, then exchange parameters. With parameter
        servers, the optimizer does not step here: servers receive the gradients and the hyperparameters in
        ``optimizer.param_groups``.

        Args:
            samples: size of the mini-batch, summed over micro-batches if gradients were accumulated.
        """

    @property
    @abstractmethod
    def progress(self) -> int:
        """Number of steps that this worker's model represents; it never falls, and may jump. Schedules follow it."""

    last_drain: Drain | None = None
    """The last drain; None before the first."""
    joined_after = 0
    """Number of the last drain before this worker took its model, if it returned; 0 if there was none."""
    seconds_waited = 0.0
    """Seconds so far in which the training loop waited for averages or servers, the work of an average included."""

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """The context of a wait; profilers show it as ``autosync/<what>/wait``."""
        begun = time.perf_counter()
        try:
            with profiled(what, "wait"):
                yield
        finally:
            self.seconds_waited += time.perf_counter() - begun

    @abstractmethod
    def drain(self) -> None:
        """Meet every live worker and leave with the same model: the average, weighted by samples since the last drain.

        All workers call this at the end of an epoch, before validation, before a checkpoint and at the end of training,
        however many steps each has taken. Floating-point and complex buffers are averaged too, and frozen parameters
        that differ.
        Integer buffers stay local; where servers wait for all workers, all buffers become rank 0's.
        """

    @abstractmethod
    def resume(self) -> None:
        """Leave the barrier of :meth:`drain` and continue training."""

    @abstractmethod
    def finish(self) -> None:
        """Report that this worker has no more data before the next drain; the others do not wait for it until then."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint beside model and optimizer: plain JSON data and tensors. Call this after a drain."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state that :meth:`state_dict` returned; call this before :meth:`start`."""

    @property
    @abstractmethod
    def state_bytes(self) -> int:
        """Bytes of state in this process, without the local optimizer's: that of an outer update or of a server."""

    @abstractmethod
    def close(self) -> None:
        """Stop threads and free memory; a second call has no effect. The mesh stays open."""
