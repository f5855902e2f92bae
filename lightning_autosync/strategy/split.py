"""The replica of a split model under a Trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine import Engine
from lightning_autosync.engine.collectives import BufferBroadcast, gather_json
from lightning_autosync.engine.waiting import count_batch
from lightning_autosync.errors import AutoSyncError, PeerLost
from lightning_autosync.hybrid import HybridPlan
from lightning_autosync.hybrid.execution.checkpoint import make_whole
from lightning_autosync.hybrid.execution.equivalence import ComparedStep, expect, untested, verify
from lightning_autosync.hybrid.execution.live_mesh import LiveMesh
from lightning_autosync.hybrid.execution.reduction import GradientReduction, ReductionSettings, clip_gradients
from lightning_autosync.hybrid.execution.split_model import SplitModel
from lightning_autosync.plan import SyncPlan
from lightning_autosync.strategy.base import Replica
from lightning_autosync.strategy.choice import choose_plan
from lightning_autosync.strategy.job import RunningJob
from lightning_autosync.strategy.settings import StrategySettings
from lightning_autosync.workload import Workload


class SplitReplica(Replica):
    """Splits a module by a plan, checks the result against the unsplit module, and synchronizes its parts.

    Args:
        module: the module, on its device and in its dtype, with rank 0's weights and buffers on every rank.
        plan: a plan that splits at least one operator.
        task: the training step by which the models are compared.
        source: name of the plan in errors.

    Attributes:
        split: the split module.
        hybrid_plan: the plan.
        untested: paths of the split modules of which the comparison says nothing.

    Raises:
        EquivalenceError: (on every rank) the split module gives other results.
        AutoSyncError: (on every rank) plan, model, cluster and job do not fit each other, or a training step fails.
            After an error on every rank the module is whole again.
        PeerLost: another rank is gone; the module stays split.
    """

    def __init__(
        self, module: nn.Module, plan: HybridPlan, settings: StrategySettings, task: ComparedStep, source: str
    ) -> None:
        self.hybrid_plan = plan
        self._optimizers: Sequence[Optimizer] = ()
        self._failed = False
        # Split operators need the same seed on all ranks, but scripts may seed ranks differently.
        seed = gather_json(torch.initial_seed() % 2**62)[0]
        mesh = LiveMesh(plan, timeout=timedelta(seconds=settings.timeout))
        self.split = SplitModel(module, plan, mesh, seed, source)
        expected = expect(self.split, task)
        self.split.split()
        reduction = None
        try:
            self._reduction = reduction = GradientReduction(self.split, _reduction_settings(settings, module))
            verify(self.split, reduction, task, expected)
        except PeerLost:
            raise  # with the rank its parts are gone
        except AutoSyncError:
            if reduction is not None:
                reduction.close()
            self.split.restore()
            raise
        self.untested = untested(self.split, expected)
        self._buffers = BufferBroadcast(module) if settings.broadcast_buffers else None

    @classmethod
    def for_trainer(
        cls, module: nn.Module, settings: StrategySettings, nodes: int, devices: int, rank: int, job: RunningJob | None
    ) -> SplitReplica:
        raise TypeError("a split replica needs a hybrid plan")

    @property
    def plan(self) -> SyncPlan:
        raise TypeError("a split model has no SyncPlan; see hybrid_plan")

    @property
    def engine(self) -> Engine | None:
        """The engine of the parameters that the most ranks share; None if no ranks share parameters."""
        return next(iter(self._reduction.engines[::-1]), None)

    @property
    def enabled(self) -> bool:
        """Whether backward passes synchronize gradients; otherwise they only accumulate them."""
        return self._reduction.enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        self._reduction.enabled = enabled

    def start_training(self, optimizers: Sequence[Optimizer], scaler: GradScaler | None) -> None:
        self._optimizers = optimizers

    @property
    def clips_norms(self) -> Literal["never", "may", "must"]:
        return "must"  # PyTorch would clip by the norm of this rank's parts only

    def clip_by_norm(
        self, parameters: Sequence[nn.Parameter], max_norm: float, error_if_nonfinite: bool = False
    ) -> Tensor | None:
        return clip_gradients(self.split, parameters, max_norm)

    def before_forward(self, synchronizes: bool) -> None:
        if self._buffers is not None:
            self._buffers.before_forward(synchronizes)

    def begin_batch(self) -> None:
        count_batch()

    def training_step(self, batch: Any) -> AbstractContextManager[None]:
        return self.split.forward(batch)

    @contextmanager
    def backward(self, scaler: GradScaler | None = None) -> Iterator[None]:
        with self._reduction.backward():
            yield

    def end_training(self) -> None:
        """Check at the end of training that copies of the same weights are equal; collective.

        Raises:
            ExchangeError: (on every rank) weights differ.
        """
        self._reduction.compare_copies()

    def gather_state(self) -> dict[str, Any] | None:
        return None

    def restore_state(self, entry: dict[str, Any] | None, steps: int) -> None:
        """Do nothing: there is no state beside parameters and optimizers."""

    def fail(self, error: BaseException) -> None:
        self._failed = True

    def close(self) -> None:
        """Stop synchronizing; after training without an error, make the module and its optimizers whole again."""
        self._reduction.close()
        if self.split.is_split and not self._failed:
            make_whole(self.split, list(self._optimizers))


def _reduction_settings(settings: StrategySettings, module: nn.Module) -> ReductionSettings:
    accelerated = any(parameter.device.type != "cpu" for parameter in module.parameters())

    def choose(workload: Workload, cluster: ClusterSpec, known: bool) -> SyncPlan:
        return choose_plan(workload, cluster, known, settings.bucket_bytes, accelerated=accelerated)[0]

    return ReductionSettings(settings.cluster, choose, settings.timeout, True, settings.check_replicas)
