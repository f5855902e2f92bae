"""What a strategy tells of its replica."""

from __future__ import annotations

from lightning_autosync.engine import Engine
from lightning_autosync.plan import Schedule, SyncPlan
from lightning_autosync.strategy.base import Replica
from lightning_autosync.strategy.exact import ExactReplica
from lightning_autosync.strategy.tuning.report import TuningReport
from lightning_autosync.strategy.tuning.step_meter import StepFigures


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
