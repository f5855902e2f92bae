"""Inside a worker: a model that computes by the clock, and synchronizes for real under a plan."""

from __future__ import annotations

import time
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine import Engine
from lightning_autosync.engine.tracing import Recorder
from lightning_autosync.measure.models.paced import PacedModule
from lightning_autosync.plan import SyncPlan, compile_plan
from lightning_autosync.workload import Workload, variable_names


def paced_module(workload: Workload, cluster: ClusterSpec) -> PacedModule:
    """The module of this rank, as fast as its node."""
    return PacedModule(workload, cluster.nodes[cluster.rank_nodes[dist.get_rank()]].speed)


class PacedReplica:
    """One rank of a paced job.

    Args:
        workload: shapes and times.
        plan: how gradients travel.
        cluster: the machines.
        timeout: seconds to wait for other ranks.
        module: `paced_module` made before for the same workload and cluster; None makes one.

    Raises:
        AutoSyncError: the three do not fit each other.
    """

    def __init__(
        self,
        workload: Workload,
        plan: SyncPlan,
        cluster: ClusterSpec,
        timeout: float,
        module: PacedModule | None = None,
    ) -> None:
        self.schedule = compile_plan(plan, workload, cluster)
        self._module = paced_module(workload, cluster) if module is None else module
        self._parameters = list(self._module.parameters())
        self._seed = torch.tensor(dist.get_rank())
        self.engine = Engine(variable_names(self._module), self.schedule, cluster=cluster, timeout=timeout)

    def step(self, recorder: Recorder | None = None) -> None:
        """Forward, backward with synchronization, optimizer."""
        loss = self._module(self._seed)
        if recorder is not None:
            recorder.end_forward()
        loss.backward()
        self._module.step_optimizer()
        # As Module.zero_grad, without its walk through the modules, which costs a core 3 us a parameter.
        for parameter in self._parameters:
            parameter.grad = None

    def run(self, steps: int) -> list[float]:
        """Seconds of each of so many steps; ranks begin together."""
        dist.barrier()
        times = [time.perf_counter()]
        for _ in range(steps):
            self.step()
            times.append(time.perf_counter())
        return [end - start for start, end in pairwise(times)]


def trace(
    workload: dict[str, Any], plan: dict[str, Any], cluster: dict[str, Any], warm_up: int, steps: int, timeout: float
) -> list[dict[str, Any]]:
    """The `StepTrace` of each of ``steps`` steps on this rank as plain data, after ``warm_up`` others."""
    documents = Workload.from_dict(workload), SyncPlan.from_dict(plan), ClusterSpec.from_dict(cluster)
    replica = PacedReplica(*documents, timeout)
    recorder = Recorder(len(replica.schedule.messages))
    traces = []
    try:
        replica.run(warm_up)
        replica.engine.trace(recorder)
        for _ in range(steps):
            dist.barrier()  # so that all ranks count from one moment
            recorder.begin()
            replica.step(recorder)
            traces.append(asdict(recorder.end()))
        return traces
    finally:
        replica.engine.close()


def measure(
    workload: dict[str, Any], plan: dict[str, Any], cluster: dict[str, Any], warm_up: int, steps: int, timeout: float
) -> list[float]:
    """Seconds of each of ``steps`` steps on this rank, after ``warm_up`` others; documents as plain data."""
    documents = Workload.from_dict(workload), SyncPlan.from_dict(plan), ClusterSpec.from_dict(cluster)
    replica = PacedReplica(*documents, timeout)
    try:
        return replica.run(warm_up + steps)[warm_up:]
    finally:
        replica.engine.close()
