"""Jobs of two ranks that measure plans before their first step, as on GPUs. The tensors are on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import jobs
import torch.distributed as dist
import tuning_jobs
from torch import nn

from lightning_autosync import AutoSyncStrategy
from lightning_autosync.engine import Engine
from lightning_autosync.engine.connections import CONNECT_TIMEOUT
from lightning_autosync.errors import OpeningError
from lightning_autosync.plan import builders, compile_plan
from lightning_autosync.strategy.tuning import accelerators
from lightning_autosync.strategy.tuning.job_tuning import JobTuning
from lightning_autosync.workload import describe, variable_names


def compare(fastest: str, model: str = "Plain") -> dict[str, Any]:
    """How far a job ends from DDP, and what it says, if a plan whose name begins with ``fastest`` is fastest."""
    logged: list[str] = []
    plans: list[str] = []
    measure = accelerators.measure_schedules

    def measured(schedules: Sequence[Any], *rest: Any) -> list[float | None]:
        found = measure(schedules, *rest)
        assert all(seconds is not None and seconds > 0 for seconds in found)
        wins = [index for index, schedule in enumerate(schedules) if index == 0 or fastest != "all_reduce"]
        return [1.0 if index == wins[-1] else 2.0 for index in range(len(schedules))]

    fit = JobTuning.start

    def start(self: JobTuning, *given: Any) -> Engine:
        engine = fit(self, *given)
        plans.append(self.resolution.plan.groups[0].topology)
        logged.append(self.resolution.reason)
        logged.append(self.report().tuning)
        return engine

    with (
        mock.patch.object(JobTuning, "_device", "cuda"),
        mock.patch.object(accelerators, "measure_schedules", measured),
        mock.patch.object(JobTuning, "start", start),
    ):
        options = {"cluster": tuning_jobs.PAIR.to_dict(), "tuning": tuning_jobs.SHORT}
        found = jobs.compare(model, strategy=options, max_epochs=2)
    return {**found, "logged": logged, "topologies": plans}


def measure() -> dict[str, Any]:
    """Times of an all-reduce, of a plan that cannot be opened, and of a star, and whether the module was changed."""
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))
    before = [parameter.detach().clone() for parameter in module.parameters()]
    workload, cluster = describe(module), tuning_jobs.PAIR
    plans = [builders.all_reduce(workload, cluster, topology=topology) for topology in ("native", "ring", "star")]
    schedules = [compile_plan(plan, workload, cluster) for plan in plans]
    opened: list[Engine] = []

    def open_engine(schedule: Any, copies: Any) -> Engine:
        if schedule is schedules[1]:
            raise OpeningError("rank 0: no route")
        engine = Engine(copies, schedule, cluster=cluster, timeout=30.0, connect_timeout=CONNECT_TIMEOUT)
        opened.append(engine)
        return engine

    found = accelerators.measure_schedules(schedules, variable_names(module), open_engine, None)
    same = all((old == new).all() for old, new in zip(before, module.parameters(), strict=True))
    clear = all(parameter.grad is None for parameter in module.parameters())
    return {"seconds": found, "same": bool(same), "clear": clear, "opened": len(opened)}


def without_memory() -> str:
    """The reason of a job on devices that have no memory left on rank 1."""
    reasons: list[str] = []
    why = accelerators._why_not

    def spy(*given: Any) -> str:
        reasons.append(why(*given))
        return reasons[-1]

    with (
        mock.patch.object(JobTuning, "_device", "cuda"),
        mock.patch.object(accelerators, "_free_memory", return_value=0 if dist.get_rank() else 1 << 40),
        mock.patch.object(accelerators, "_why_not", spy),
    ):
        jobs.fit("Plain", AutoSyncStrategy(cluster=tuning_jobs.PAIR, tuning=tuning_jobs.SHORT), max_epochs=1)
    return reasons[0]
