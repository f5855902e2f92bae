"""What Lightning and users call of a strategy: its collective calls, and what it tells of its replica."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autosync.engine import Engine
from lightning_autosync.plan import Schedule, SyncPlan
from lightning_autosync.strategy.base import Replica
from lightning_autosync.strategy.exact import ExactReplica
from lightning_autosync.strategy.shares.batch_shares import BatchShares
from lightning_autosync.strategy.tuning.report import TuningReport
from lightning_autosync.strategy.tuning.step_meter import StepFigures

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object


class CollectiveCalls(_Base):
    """Makes each collective call of Lightning's strategy in the context that the replica or the shares need."""

    _replica: Replica | None
    _shares: BatchShares | None

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if self._shares is not None:
            tensor = self._shares.weigh(tensor, reduce_op)
        with self._collective("sync_dist=True (a reduction over ranks)", each_step=True):
            return super().reduce(tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        # Not marked `each_step`: Lightning's checkpoints call this between steps only when one is due. The number of
        # ranks is the process group's, which may have lost some.
        with self._collective("a decision of all ranks"):
            count = super().reduce(torch.tensor(int(decision), device=self.root_device), reduce_op="sum")
            return bool(count == dist.get_world_size()) if all else bool(count)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        with self._collective("all_gather", each_step=True):
            if self._shares is not None:
                self._shares.check_gather(tensor, group)
            return super().all_gather(tensor, group, sync_grads)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        with self._collective("a barrier"):
            super().barrier(*args, **kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        with self._collective("a broadcast"):
            return super().broadcast(*args, **kwargs)

    def _collective(self, what: str, each_step: bool = False) -> AbstractContextManager[None]:
        """The context of a collective call; see `Replica.collective`."""
        if self._shares is not None:  # with exact replicas, which need no other context
            return self._shares.collective(what)
        return nullcontext() if self._replica is None else self._replica.collective(what, each_step)


class ReplicaViews:
    """The plan, the engine and the measurements of the replica, for users and callbacks."""

    _replica: Replica | None

    @property
    def plan(self) -> SyncPlan | None:
        """The plan in use; None before training is set up."""
        return self._replica.plan if self._replica is not None else None

    @property
    def schedule(self) -> Schedule | None:
        """The compiled plan; None before training is set up."""
        return self._replica.schedule if self._replica is not None else None

    @property
    def engine(self) -> Engine | None:
        """The running engine; None before training is set up and after it is torn down."""
        return self._replica.engine if self._replica is not None else None

    @property
    def tunes(self) -> bool:
        """Whether other plans are tried on training steps, or may yet be."""
        return self._replica is not None and self._replica.tunes

    def report(self) -> TuningReport | None:
        """How gradients are synchronized, why, and which plans were tried; None if replicas are not synchronous."""
        return self._replica.report() if isinstance(self._replica, ExactReplica) else None

    def settle(self) -> None:
        """Complete the parameters whose last step is still due with ``overlap="step"``; not collective.

        Readers of parameters do this by themselves, except those that docs/overlap.md lists: ``torch.func``, code in
        C++, and aliases of weights and gradients that were made in an earlier step.

        Raises:
            ExchangeError: a peer was lost or did not answer in time.
        """
        if self._replica is not None:
            self._replica.settle()

    def measure_steps(self) -> bool:
        """Record what synchronized steps take on this rank from now on; see `Replica.measure_steps`."""
        return self._replica is not None and self._replica.measure_steps()

    def step_figures(self) -> StepFigures | None:
        """What the synchronized steps since the last call took and sent; see `Replica.step_figures`."""
        return None if self._replica is None else self._replica.step_figures()
