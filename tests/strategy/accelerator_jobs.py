"""Jobs of two ranks that measure plans before their first step, as on GPUs. The tensors are on the CPU."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock
from weakref import WeakSet

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

PACE = 0.3
"""Seconds of a backward pass."""


MEASURES = replace(tuning_jobs.SHORT, accelerators=True)


@contextmanager
def as_on_a_gpu() -> Iterator[list[str]]:
    """The context of jobs that take their model to be on a GPU; the reasons for their plans, and how tuning ended."""
    told: list[str] = []
    start = JobTuning.start

    def spy(self: JobTuning, *given: Any) -> Engine:
        engine = start(self, *given)
        told.extend([self.resolution.plan.groups[0].topology, self.resolution.reason, self.report().tuning])
        return engine

    with mock.patch.object(JobTuning, "_device", "cuda"), mock.patch.object(JobTuning, "start", spy):
        yield told


def compare(other_wins: bool, model: str = "Plain", **options: Any) -> dict[str, Any]:
    """How far a job ends from DDP, and what it tells, if the all-reduce or the last other plan is fastest."""
    measure = accelerators.measure_schedules

    def measured(schedules: Sequence[Any], *rest: Any) -> list[float]:
        found = measure(schedules, *rest)
        assert all(0 < seconds < math.inf for seconds in found)
        winner = len(schedules) - 1 if other_wins else 0
        return [0.01 if index == winner else 0.02 for index in range(len(schedules))]

    with as_on_a_gpu() as told, mock.patch.object(accelerators, "measure_schedules", measured):
        strategy = {"cluster": tuning_jobs.PAIR.to_dict(), "tuning": MEASURES}
        found = jobs.compare(model, strategy=strategy, max_epochs=2, **options)
    return {**found, "told": told}


def unasked() -> list[str]:
    """What a job tells that does not ask for measurements."""
    with as_on_a_gpu() as told:
        jobs.fit("Plain", AutoSyncStrategy(cluster=tuning_jobs.PAIR, tuning=tuning_jobs.SHORT), max_epochs=1)
    return told


def measure() -> dict[str, Any]:
    """Times of an all-reduce, of a plan that cannot be opened, and of a star, and how many buffers stay in memory."""
    copies, fault = accelerators._copies(variable_names(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))))
    assert not fault
    module = nn.ParameterDict({name.replace(".", "_"): copy for name, copy in copies})
    workload, cluster = describe(module), tuning_jobs.PAIR
    copies = variable_names(module)
    plans = [builders.all_reduce(workload, cluster, topology=topology) for topology in ("native", "ring", "star")]
    schedules = [compile_plan(plan, workload, cluster) for plan in plans]
    opened = WeakSet[Engine]()
    counts: list[int] = []

    def open_engine(schedule: Any) -> Engine:
        if schedule is schedules[1]:
            raise OpeningError("rank 0: no route")
        counts.append(len(opened))
        engine = Engine(copies, schedule, cluster=cluster, timeout=30.0, connect_timeout=CONNECT_TIMEOUT)
        opened.add(engine)
        return engine

    gc.disable()
    try:
        found = accelerators.measure_schedules(schedules, copies, open_engine, None)
        paced = accelerators.measure_schedules(schedules[:1], copies, open_engine, None, PACE)
    finally:
        gc.enable()
    zeros = all(parameter.grad is not None and not parameter.grad.any() for _, parameter in copies)
    return {"seconds": found, "paced": paced, "zeros": zeros, "alive": counts}


def without_memory() -> list[str]:
    """What a job tells if rank 1's device has no memory left."""
    copies = accelerators._copies

    def fail(parameters: Any) -> Any:
        return ([], "no memory") if dist.get_rank() else copies(parameters)

    with as_on_a_gpu() as told, mock.patch.object(accelerators, "_copies", fail):
        jobs.fit("Plain", AutoSyncStrategy(cluster=tuning_jobs.PAIR, tuning=MEASURES), max_epochs=1)
    return told


def with_sizes() -> list[int]:
    """Numbers of messages of the plans that are measured, with small messages."""
    counts: list[int] = []

    def measured(schedules: Sequence[Any], *_: Any) -> list[float]:
        counts.extend(len(schedule.messages) for schedule in schedules)
        return [1.0 for _ in schedules]

    with as_on_a_gpu(), mock.patch.object(accelerators, "measure_schedules", measured):
        strategy = AutoSyncStrategy(cluster=tuning_jobs.PAIR, tuning=MEASURES, bucket_cap_mb=1e-4)
        jobs.fit("Plain", strategy, max_epochs=1)
    return counts


def embedding_plans() -> list[dict[str, Any]]:
    """The plan of a job with a large embedding, and the one without tuning."""
    found = []
    with as_on_a_gpu():
        for tuning in (MEASURES, "off"):
            strategy = AutoSyncStrategy(cluster=tuning_jobs.PAIR, tuning=tuning)
            jobs.fit("DenseTable", strategy, max_epochs=1)
            assert strategy.plan is not None
            found.append(strategy.plan.to_dict())
    return found
