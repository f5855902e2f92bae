"""One rank's replica of the user's module, and the wrapper around the module."""

# ruff: noqa: B027 (methods that do nothing by default, on purpose)
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_autosync.engine import Engine
from lightning_autosync.plan import Schedule, SyncPlan
from lightning_autosync.strategy.job import RunningJob
from lightning_autosync.strategy.settings import StrategySettings
from lightning_autosync.strategy.tuning.step_meter import StepFigures


class Replica(ABC):
    """Synchronizes one rank's parameters, gradients and buffers by the plan. The strategy calls it at each event.

    `exact.ExactReplica` synchronizes gradients in every step. `relaxed.RelaxedReplica` lets ranks make their own steps
    and brings them together at the ends of epochs. Methods that a subclass does not need do nothing.

    Attributes:
        enabled: whether backward passes synchronize gradients; otherwise they only accumulate them.
        detects_failures: whether the replica detects lost ranks itself, so that the strategy need not.
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
            module: the module, on its device and in its dtype.
            settings: settings of the strategy.
            nodes: number of nodes in the job.
            devices: number of ranks per node.
            rank: rank of this process in the job.
            job: the result of `find_job` if this process returns to a job, otherwise None.
        """

    @classmethod
    def find_job(cls, host: str, timeout: float, first: bool) -> RunningJob | None:
        """The job to which this process returns, if its rank was lost before; otherwise None.

        Args:
            host: address of rank 0.
            timeout: seconds that the job's store may take to answer.
            first: whether this process is rank 0, which cannot return.
        """
        return None

    @property
    @abstractmethod
    def plan(self) -> SyncPlan:
        """The plan in use."""

    @property
    def schedule(self) -> Schedule | None:
        """The compiled plan; None if the plan has no schedule."""
        return None

    @property
    def engine(self) -> Engine | None:
        """The running engine; None if there is none."""
        return None

    @property
    def tunes(self) -> bool:
        """Whether other plans are tried on training steps, or may yet be; the same on all ranks."""
        return False

    def measure_steps(self) -> bool:
        """Record what synchronized steps take on this rank from now on; returns whether this replica can.

        Steps are timed by the clock of the host, so only modules on the CPU can be measured.
        Do not call this during a backward pass. It makes no collective calls.
        """
        return False

    def step_figures(self) -> StepFigures | None:
        """The figures of the steps since the last call; None if there were none, or `measure_steps` was not called."""
        return None

    def settle(self, compiled: bool = False) -> None:
        """Complete the parameters whose last step is still due; not collective, and without effect if none is.

        Args:
            compiled: whether a forward pass follows that `torch.compile` compiled.

        Raises:
            ExchangeError: a peer was lost or did not answer in time.
        """

    # Training

    def attach(self, trainer: Any) -> None:
        """Called once with the Trainer of this module, before the rest of its setup."""

    def share_data(self, dataloader: object) -> object:
        """The training data loader, after Lightning processed it; may change the samples that this rank draws."""
        return dataloader

    def estimating_steps(self) -> AbstractContextManager[None]:
        """The context of ``configure_optimizers``, which may read ``trainer.estimated_stepping_batches``."""
        return nullcontext()

    def start_training(self, optimizers: Sequence[Optimizer], scaler: GradScaler | None) -> None:
        """Called on all ranks when training begins.

        Args:
            optimizers: optimizers of the module.
            scaler: the precision plugin's loss scaler; None if there is none.
        """

    @property
    def clips_norms(self) -> Literal["never", "may", "must"]:
        """Whether to call `clip_by_norm`: ``may`` if PyTorch's clipping waits longer, ``must`` if it would be wrong."""
        return "never"

    def clip_by_norm(
        self, parameters: Sequence[nn.Parameter], max_norm: float, error_if_nonfinite: bool = False
    ) -> Tensor | None:
        """Clip gradients by their 2-norm, like ``torch.nn.utils.clip_grad_norm_``; collective.

        Returns:
            [] the norm before clipping; None if the caller must clip, on every rank.

        Raises:
            ExchangeError: a peer was lost or did not answer in time.
            RuntimeError: the norm is not finite, with ``error_if_nonfinite``.
        """
        return None

    def unscaling(self, scaler: GradScaler | None) -> AbstractContextManager[None]:
        """The context in which ``scaler`` unscales gradients and steps an optimizer; all ranks enter it together."""
        return nullcontext()

    def resume(self) -> None:
        """Called when this rank begins an epoch, even if it gets no batch of it; ends the last `drain`."""

    def begin_batch(self) -> None:
        """Called when Lightning begins a batch."""

    def training_step(self, batch: Any) -> AbstractContextManager[None]:
        """The context of the user's ``training_step``."""
        return nullcontext()

    @abstractmethod
    def before_forward(self, synchronizes: bool) -> None:
        """Called before each forward pass; ``synchronizes`` tells whether a synchronized backward pass may follow."""

    def after_forward(self) -> None:
        """Called after each forward pass of the wrapper with gradients, which a backward pass may follow."""

    def backward(self, scaler: GradScaler | None = None) -> AbstractContextManager[None]:
        """The context of one backward pass, of a loss that ``scaler`` scales."""
        return nullcontext()

    def stepping(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """The context of an optimizer's step, which may compute the gradients in its closure."""
        return nullcontext()

    def drain(self) -> None:
        """Called where all live ranks wait for each other: at the ends of epochs, before validation, and at the end."""

    def end_training(self) -> None:
        """Called on all ranks when training ends."""

    # Collective calls and checkpoints

    def collective(self, what: str, each_step: bool = False) -> AbstractContextManager[None]:
        """The context of a collective call of the strategy.

        Args:
            what: name of the call in errors.
            each_step: whether a call between training steps would come after every step.
        """
        return nullcontext()

    def before_checkpoint(self) -> None:
        """Called on all ranks before a checkpoint is collected."""

    def optimizer_state(self, saved: dict[str, Any]) -> dict[str, Any]:
        """The state of the optimizer for a checkpoint; ``saved`` is the state in this process."""
        return saved

    @abstractmethod
    def gather_state(self) -> dict[str, Any] | None:
        """The replicas' entry in a checkpoint, on rank 0; None elsewhere, and if there is no state; collective.

        It has plain values and tensors, readable with ``torch.load(weights_only=True)``.
        """

    @abstractmethod
    def restore_state(self, entry: dict[str, Any] | None, steps: int) -> None:
        """Resume from a checkpoint.

        Args:
            entry: the result of `gather_state`, of this or another kind of replica; None if the checkpoint has none.
            steps: number of optimizer steps in the checkpoint.
        """

    # The end

    def fail(self, error: BaseException) -> None:
        """Called when this rank ends with ``error``."""

    @abstractmethod
    def close(self) -> None:
        """Stop synchronizing."""


class SynchronizedModule(nn.Module):
    """Wraps the user's module, as `DistributedDataParallel` does: every forward pass goes through it.

    Attributes:
        module: the user's module.
        replica: the replica that synchronizes the module.
    """

    def __init__(self, module: nn.Module, replica: Replica) -> None:
        super().__init__()
        self.module = module
        self.replica = replica

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.prepare_forward()
        output = self.module(*args, **kwargs)
        self._after_forward()
        return output

    def prepare_forward(self) -> None:
        """Do what comes before each forward pass; collective where ranks exchange buffers."""
        # Compiled code reads parameters without asking their class. Evaluation has faster paths for plain parameters.
        compiled = torch.compiler.is_compiling()
        if compiled or not self.module.training or not torch.is_grad_enabled():
            self._settle(compiled)
        self._before_forward()

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward passes synchronize gradients."""
        return self.replica.enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, enabled: bool) -> None:
        self.replica.enabled = enabled

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which backward passes only accumulate gradients on this rank."""
        return accumulation(self.replica)

    @torch.compiler.disable
    def _settle(self, compiled: bool) -> None:
        self.replica.settle(compiled)

    @torch.compiler.disable
    def _after_forward(self) -> None:
        if torch.is_grad_enabled():
            self.replica.after_forward()

    @torch.compiler.disable
    def _before_forward(self) -> None:
        # With manual optimization, buffers follow rank 0 only once, as under Lightning's DDP.
        followed = getattr(self.module, "automatic_optimization", True)
        self.replica.before_forward(followed and self.replica.enabled and torch.is_grad_enabled())


@contextmanager
def accumulation(replica: Replica) -> Iterator[None]:
    """A context in which backward passes only accumulate gradients on this rank."""
    before, replica.enabled = replica.enabled, False
    try:
        yield
    finally:
        replica.enabled = before
