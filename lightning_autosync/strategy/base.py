"""One rank's replica of the user's module, and what stands in place of the module."""

# ruff: noqa: B027 (methods that do nothing by default, on purpose)
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_autosync.engine import Engine
from lightning_autosync.plan import Schedule, SyncPlan
from lightning_autosync.strategy.job import RunningJob
from lightning_autosync.strategy.settings import StrategySettings


class Replica(ABC):
    """Keeps one rank's parameters, gradients and buffers as the plan wants them; the strategy calls it at each event.

    `exact.ExactReplica` synchronizes gradients in every step. `relaxed.RelaxedReplica` lets ranks take steps of their
    own and brings them together at the ends of epochs. What a kind of replica has no use for does nothing here.

    Attributes:
        enabled: whether a backward pass synchronizes, and does not only accumulate gradients.
        detects_failures: whether it notices lost ranks by itself, so that the strategy need not.
    """

    enabled: bool
    detects_failures = False

    @classmethod
    @abstractmethod
    def for_trainer(
        cls, module: nn.Module, settings: StrategySettings, nodes: int, devices: int, rank: int, job: RunningJob | None
    ) -> Replica:
        """The replica of a Trainer's module; collective.

        Args:
            module: on its device and in its dtype.
            settings: what the user asked for.
            nodes: number of the job's nodes.
            devices: ranks on each.
            rank: this process's in the job.
            job: of `find_job`, where this process comes back to a job.
        """

    @classmethod
    def find_job(cls, host: str, timeout: float, first: bool) -> RunningJob | None:
        """The job that this process comes back to, if its rank was lost before.

        Args:
            host: rank 0's address.
            timeout: seconds that the job's store may take to answer.
            first: whether this process is rank 0, which cannot come back.
        """
        return None

    @property
    @abstractmethod
    def plan(self) -> SyncPlan:
        """The plan that runs."""

    @property
    def schedule(self) -> Schedule | None:
        """The compiled plan, if the plan has a schedule."""
        return None

    @property
    def engine(self) -> Engine | None:
        """The running engine, if there is one."""
        return None

    # Training

    def attach(self, trainer: Any) -> None:
        """The Trainer whose module this is; called once, before training is set up further."""

    def share_data(self, dataloader: object) -> object:
        """What Lightning made of a training data loader; may change which samples this rank draws."""
        return dataloader

    def estimating_steps(self) -> AbstractContextManager[None]:
        """Around ``configure_optimizers``, which may ask for ``trainer.estimated_stepping_batches``."""
        return nullcontext()

    def start_training(self, optimizers: Sequence[Optimizer], scaler: GradScaler | None) -> None:
        """Training begins on all ranks.

        Args:
            optimizers: of the module.
            scaler: what the precision plugin scales losses with, if anything.
        """

    def begin_epoch(self) -> None:
        """A rank begins an epoch, also one that will get no batch of it."""

    def begin_batch(self) -> None:
        """Lightning begins a batch."""

    def training_step(self, batch: Any) -> AbstractContextManager[None]:
        """Around the user's ``training_step``."""
        return nullcontext()

    @abstractmethod
    def before_forward(self, synchronizes: bool) -> None:
        """Before each forward pass; ``synchronizes`` if a synchronized backward pass may follow."""

    def backward(self, scaler: GradScaler | None = None) -> AbstractContextManager[None]:
        """Around everything that belongs to one backward pass, whose loss ``scaler`` scales."""
        return nullcontext()

    def stepping(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Around an optimizer's step, which may compute the gradients by its closure."""
        return nullcontext()

    def end_epoch(self) -> None:
        """This rank's part of an epoch is over, or validation begins."""

    def end_training(self) -> None:
        """Training ends on all ranks."""

    # What all ranks do together

    def collective(self, what: str, each_step: bool = False) -> AbstractContextManager[None]:
        """Around a collective call of the strategy.

        Args:
            what: names the call in errors.
            each_step: whether it follows every step, if it follows a step at all.
        """
        return nullcontext()

    def before_checkpoint(self) -> None:
        """A checkpoint is about to be collected on all ranks."""

    def optimizer_state(self, saved: dict[str, Any]) -> dict[str, Any]:
        """The state of the optimizer for a checkpoint; ``saved`` is this process's own."""
        return saved

    @abstractmethod
    def gather_state(self) -> dict[str, Any] | None:
        """The replicas' entry in a checkpoint on rank 0; None elsewhere and where there is nothing to keep; collective.

        It holds plain values and tensors, readable with ``torch.load(weights_only=True)``.
        """

    @abstractmethod
    def restore_state(self, entry: dict[str, Any] | None, steps: int) -> None:
        """Continue from a checkpoint.

        Args:
            entry: what `gather_state` returned, of this or another kind of replica; None if the checkpoint has none.
            steps: optimizer steps that the checkpoint has seen.
        """

    # The end

    def fail(self, error: BaseException) -> None:
        """This rank ends with ``error``."""

    @abstractmethod
    def close(self) -> None:
        """Stop synchronizing."""


class SynchronizedModule(nn.Module):
    """Stands in place of the user's module, as `DistributedDataParallel` does: every forward pass comes by here.

    Attributes:
        module: the user's module.
        replica: what keeps it equal on all ranks.
    """

    def __init__(self, module: nn.Module, replica: Replica) -> None:
        super().__init__()
        self.module = module
        self.replica = replica

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._before_forward()
        return self.module(*args, **kwargs)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward passes synchronize gradients."""
        return self.replica.enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, enabled: bool) -> None:
        self.replica.enabled = enabled

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backward passes only accumulate gradients on this rank."""
        return accumulation(self.replica)

    @torch.compiler.disable
    def _before_forward(self) -> None:
        # With manual optimization, buffers follow rank 0 once, as Lightning has it with DDP.
        followed = getattr(self.module, "automatic_optimization", True)
        self.replica.before_forward(followed and self.replica.enabled and torch.is_grad_enabled())


@contextmanager
def accumulation(replica: Replica) -> Iterator[None]:
    """Inside, backward passes only accumulate gradients on this rank."""
    before, replica.enabled = replica.enabled, False
    try:
        yield
    finally:
        replica.enabled = before
