"""Inside a worker: one workload after the other, and for each many plans, one engine after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.lab.validation.replica import PacedReplica, paced_module
from lightning_autosync.plan import SyncPlan
from lightning_autosync.workload import Workload

_FAR = 3.0
"""Times the budget for all steps."""


@dataclass(frozen=True)
class Budget:
    """How long a plan is measured.

    Attributes:
        warm_up: steps that are not counted.
        seconds: how long the counted steps may take together ...
        least: ... if so many do ...
        most: ... and no more than these.
        timeout: seconds to wait for other ranks.
    """

    warm_up: int
    seconds: float
    least: int
    most: int
    timeout: float

    def steps(self, seconds: float) -> int:
        """How many steps to count where one takes so long; of a plan far beyond the budget, one tells enough."""
        if seconds > _FAR * self.seconds:
            return 1
        return min(self.most, max(self.least, math.ceil(self.seconds / seconds)))


class Job:
    """A workload on a cluster; its module serves all plans."""

    def __init__(self, workload: Workload, cluster: ClusterSpec) -> None:
        self._workload = workload
        self._cluster = cluster
        self._module = paced_module(workload, cluster)

    def measure(self, plan: SyncPlan, budget: Budget) -> list[float]:
        """Seconds of each counted step on this rank; equally many on all."""
        replica = PacedReplica(self._workload, plan, self._cluster, budget.timeout, self._module)
        try:
            last = torch.tensor(replica.run(budget.warm_up)[-1], dtype=torch.float64)
            dist.all_reduce(last, dist.ReduceOp.MAX)
            return replica.run(budget.steps(float(last)))
        finally:
            replica.engine.close()


_job: Job | None = None


def prepare(workload: dict[str, Any], cluster: dict[str, Any]) -> None:
    """Take up a workload, in place of the one before; documents as plain data."""
    global _job
    _job = Job(Workload.from_dict(workload), ClusterSpec.from_dict(cluster))


def measure(plans: Sequence[dict[str, Any]], budget: dict[str, Any]) -> list[list[float]]:
    """Seconds of each counted step on this rank, plan by plan; plans and the `Budget` as plain data."""
    assert _job is not None, "prepare comes first"
    return [_job.measure(SyncPlan.from_dict(plan), Budget(**budget)) for plan in plans]
