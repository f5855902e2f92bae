"""The interface between a training loop and a relaxed synchronization."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from torch.optim import Optimizer


class Drain(NamedTuple):
    """A meeting of all live workers.

    Attributes:
        number: used for no other drain of this training, and growing.
        starts: by rank of who was there, how often it has started: who came back after a loss is another process.
    """

    number: int
    starts: dict[int, int]


class Synchronizer(ABC):
    """One worker's side of a relaxed synchronization.

    The training loop calls, in this order::

        start()  (step()*  finish()?  drain()  resume())*  close()

    Between two drains, workers may take different numbers of steps. Every method raises
    :class:`~lightning_autosync.errors.ExchangeError` within a bounded time if whoever coordinates is lost.
    """

    @abstractmethod
    def start(self) -> None:
        """Begin with rank 0's tensors; every live worker must call it.

        In a job that already runs, a worker that came back takes a live peer's tensors instead; and where optimizers
        step on the workers, its first step goes on from the state of that peer's optimizer.
        """

    @abstractmethod
    def step(self, optimizer: Optimizer, samples: int) -> None:
        """Use the gradients of the local mini-batch, which are ready (accumulated, unscaled, clipped).

        Partial reduce and periodic averaging call ``optimizer.step()``, then exchange parameters. A parameter server
        gets gradients and the hyperparameters in ``optimizer.param_groups``, and the optimizer does not step here.

        Args:
            optimizer: the optimizer of the parameters.
            samples: size of the mini-batch (of all micro-batches, where gradients were accumulated).
        """

    @property
    @abstractmethod
    def progress(self) -> int:
        """Steps that this worker's model stands for; schedules follow it. It never falls, and may jump after a step."""

    last_drain: Drain | None = None
    """None before the first."""
    joined_after = 0
    """The number of the last drain before a worker that came back took its model; 0 if there was none."""

    @abstractmethod
    def drain(self) -> None:
        """Meet every live worker and leave with the same model: the average, weighted by samples since the last drain.

        Called by all at the end of an epoch, before validation, before a checkpoint and at the end of training, however
        many steps each has taken. Float buffers are averaged too; integer ones, which count or number, stay each
        worker's own (where servers wait for all workers, they are rank 0's).
        """

    @abstractmethod
    def resume(self) -> None:
        """Leave the barrier of :meth:`drain` and train on."""

    @abstractmethod
    def finish(self) -> None:
        """This worker has no more data before the next drain: the others go on without waiting for it."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps beside model and optimizer, taken after a drain: plain JSON data and tensors."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned; called before :meth:`start`."""

    @property
    @abstractmethod
    def state_bytes(self) -> int:
        """Bytes kept in this process beside the optimizer's own state: an outer update's, or a server's optimizer's."""

    @abstractmethod
    def close(self) -> None:
        """Stop threads and free memory; may be called again. The mesh stays open."""
