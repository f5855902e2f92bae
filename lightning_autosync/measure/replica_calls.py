"""Functions that a measurement session calls in workers. Documents and settings come as plain data.

Contenders live side by side under names (`set_up` to `tear_down`), or one after the other in a single call
(`measure_plans`, `trace`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import digest
from lightning_autosync.engine.tracing import Recorder
from lightning_autosync.hybrid import HybridPlan
from lightning_autosync.measure.bench.settings import DDPOptions
from lightning_autosync.measure.models.recipes import model_of
from lightning_autosync.measure.replicas import SEED, DDPReplica, HybridReplica, PlanReplica, Replica, Training
from lightning_autosync.plan import SyncPlan
from lightning_autosync.workload import Workload, capture

_FAR = 1e30
"""Deviation of gradients that are not finite: NaN is above no limit, and JSON has no infinity."""
_live: dict[str, Replica] = {}
_kept_gradients: dict[str, list[Tensor]] = {}
_paced_trainings: dict[str, Training] = {}


def set_up(
    name: str,
    model: dict[str, Any],
    sparse: bool,
    cluster: dict[str, Any],
    timeout: float,
    ddp: dict[str, Any] | None = None,
    plan: dict[str, Any] | None = None,
    workload: dict[str, Any] | None = None,
    hybrid: dict[str, Any] | None = None,
) -> None:
    """Make a contender: DDP with the arguments ``ddp``, ``plan`` for ``workload``, or a ``hybrid`` plan.

    Args:
        name: under which it lives.
        model: the recipe of the module.
        sparse: whether its embeddings make sparse gradients.
        cluster: the machines, whose nodes may compute at different speeds.
        timeout: seconds that exchanges of a plan wait for other ranks.
    """
    described = ClusterSpec.from_dict(cluster)
    training = Training.of(model_of(model), sparse, described)
    if ddp is not None:
        _live[name] = DDPReplica(training, DDPOptions(**ddp), described)
    elif hybrid is not None:
        _live[name] = HybridReplica(training, HybridPlan.from_dict(hybrid), described, timeout)
    else:
        documents = SyncPlan.from_dict(plan), Workload.from_dict(workload)
        _live[name] = PlanReplica(training, *documents, described, timeout)


def tear_down(name: str) -> None:
    """End a contender; nothing happens if there is none of that name."""
    _kept_gradients.pop(name, None)
    replica = _live.pop(name, None)
    if replica is not None:
        replica.close()


def forget() -> None:
    """End every contender, whatever state it is in."""
    for name in list(_live):
        with suppress(Exception):
            tear_down(name)


def measure(name: str, steps: int) -> list[float]:
    """Seconds of each of ``steps`` steps of a contender on this rank."""
    return _live[name].run(steps)


def keep_gradients(name: str) -> None:
    """Keep the gradients of a contender's first batch, with which `deviation` compares those of others."""
    _kept_gradients[name] = _gradients(_live[name])


def deviation(name: str, reference: str) -> float:
    """How far a contender's gradients are from the kept ones of a reference: length of the difference over length.

    Both must be at the same weights, as before their first step, and see the first batch.
    """
    found, expected = _gradients(_live[name]), _kept_gradients[reference]
    difference = sum(float((a - b).square().sum()) for a, b in zip(found, expected, strict=True))
    length = sum(float(gradient.square().sum()) for gradient in expected)
    found = (difference / length) ** 0.5
    return found if math.isfinite(found) else _FAR


def _gradients(replica: Replica) -> list[Tensor]:
    torch.manual_seed(SEED + dist.get_rank())  # so that dropout drops the same for each contender
    replica.backward()
    gradients = replica.gradients()
    replica.module.zero_grad()
    return gradients


@dataclass(frozen=True)
class StepBudget:
    """How many steps of a plan are measured, depending on what a step takes.

    Attributes:
        warm_up: steps that are not counted, at least one.
        seconds: the counted steps take about so long together, ...
        min_steps: ... but there are at least so many ...
        max_steps: ... and at most so many.
        single_beyond: seconds of a step beyond which a single one is counted; None for no limit.
    """

    warm_up: int
    seconds: float
    min_steps: int
    max_steps: int
    single_beyond: float | None = None

    def steps(self, seconds: float) -> int:
        """How many steps to count where one takes so long."""
        if self.single_beyond is not None and seconds > self.single_beyond:
            return 1
        return min(self.max_steps, max(self.min_steps, math.ceil(self.seconds / seconds)))


def measure_plans(
    workload: dict[str, Any],
    cluster: dict[str, Any],
    plans: Sequence[dict[str, Any]],
    budget: dict[str, Any],
    timeout: float,
) -> list[list[float]]:
    """Measure plans one after the other, with paced compute.

    Args:
        budget: fields of a `StepBudget`.
        timeout: seconds that exchanges wait for other ranks.

    Returns:
        By plan the seconds of each counted step on this rank; all ranks count equally many.
    """
    return [_measure_plan(workload, cluster, plan, StepBudget(**budget), timeout) for plan in plans]


def _measure_plan(
    workload: dict[str, Any], cluster: dict[str, Any], plan: dict[str, Any], budget: StepBudget, timeout: float
) -> list[float]:
    with _paced(workload, cluster, plan, timeout) as replica:
        last = torch.tensor(replica.run(budget.warm_up)[-1], dtype=torch.float64)
        dist.all_reduce(last, dist.ReduceOp.MAX)
        return replica.run(budget.steps(float(last)))


def trace(
    workload: dict[str, Any], cluster: dict[str, Any], plan: dict[str, Any], warm_up: int, steps: int, timeout: float
) -> list[dict[str, Any]]:
    """The `StepTrace` of each of ``steps`` steps on this rank as plain data, after ``warm_up`` others."""
    with _paced(workload, cluster, plan, timeout) as replica:
        recorder, traces = Recorder(len(replica.schedule.messages)), []
        replica.run(warm_up)
        if steps:
            replica.engine.trace(recorder)
        for _ in range(steps):
            dist.barrier()  # so that all ranks count from one moment
            recorder.begin()
            replica.step(recorder)
            traces.append(asdict(recorder.end()))
        return traces


@contextmanager
def _paced(
    workload: dict[str, Any], cluster: dict[str, Any], plan: dict[str, Any], timeout: float
) -> Iterator[PlanReplica]:
    """A plan with paced compute, for as long as the block runs."""
    described = Workload.from_dict(workload), ClusterSpec.from_dict(cluster)
    key = digest([workload, cluster])
    if key not in _paced_trainings:
        # One is kept, since many plans for one workload follow each other, and making its module takes long.
        _paced_trainings.clear()
        _paced_trainings[key] = Training.paced(*described)
    replica = PlanReplica(_paced_trainings[key], SyncPlan.from_dict(plan), *described, timeout)
    try:
        yield replica
    finally:
        replica.close()


def profile(model: dict[str, Any]) -> dict[str, Any]:
    """The workload of a model as plain data, measured on this rank's first batch while all ranks compute."""
    recipe = model_of(model)
    torch.manual_seed(SEED)
    module = recipe.module()
    batch = recipe.batches(dist.get_rank())[0]
    dist.barrier()
    return capture(module, batch, training_step=lambda given: module(*given), name=recipe.title).to_dict()
