"""Functions that a measurement session calls in workers. Documents and settings are passed as plain data.

Contenders live side by side under names (`set_up` to `tear_down`), or run one after the other in a single call
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
from lightning_autosync.measure.models.model import with_kinds_of
from lightning_autosync.measure.models.recipes import model_of
from lightning_autosync.measure.replicas import (
    SEED,
    DDPReplica,
    HybridReplica,
    OverlapReplica,
    PlanReplica,
    Replica,
    Training,
)
from lightning_autosync.measure.workers.devices import Device
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
    device: Device = "cpu",
    overlap: bool = False,
    views: bool = False,
) -> None:
    """Create a contender: DDP with the arguments ``ddp``, ``plan`` for ``workload``, or a ``hybrid`` plan.

    Args:
        model: recipe of the module.
        sparse: whether the module's embeddings have sparse gradients.
        cluster: the machines; nodes may compute at different speeds.
        timeout: seconds for which exchanges of a plan wait for other ranks.
        ddp: fields of `DDPOptions`.
        plan, workload: a `SyncPlan` and its `Workload`.
        hybrid: a `HybridPlan`.
        device: where the module trains.
        overlap: whether the sums of a plan travel while the next forward pass computes.
        views: whether the gradients of a plan become views of buffers.
    """
    described = ClusterSpec.from_dict(cluster)
    training = Training.of(model_of(model), sparse, described, device)
    if ddp is not None:
        _live[name] = DDPReplica(training, DDPOptions(**ddp), described)
    elif hybrid is not None:
        _live[name] = HybridReplica(training, HybridPlan.from_dict(hybrid), described, timeout)
    else:
        documents = SyncPlan.from_dict(plan), Workload.from_dict(workload)
        kind = OverlapReplica if overlap else PlanReplica
        _live[name] = kind(training, *documents, described, timeout, views)


def tear_down(name: str) -> None:
    """Close a contender; does nothing if there is none of that name."""
    _kept_gradients.pop(name, None)
    replica = _live.pop(name, None)
    if replica is not None:
        replica.close()


def forget() -> None:
    """Close every contender and ignore errors, since any may be broken."""
    for name in list(_live):
        with suppress(Exception):
            tear_down(name)


def measure(name: str, steps: int) -> list[float]:
    """Seconds of each of ``steps`` steps of a contender on this rank."""
    return _live[name].run(steps)


def keep_gradients(name: str) -> None:
    """Keep the gradients of a contender's first batch. `deviation` compares other contenders with them."""
    _kept_gradients[name] = _gradients(_live[name])


def deviation(name: str, reference: str) -> float:
    """Relative L2 distance of a contender's gradients from the kept gradients of a reference.

    Both are computed on the first batch. The weights must be the same, as they are before the first step.
    """
    found, expected = _gradients(_live[name]), _kept_gradients[reference]
    difference = sum(float((a - b).square().sum()) for a, b in zip(found, expected, strict=True))
    length = sum(float(gradient.square().sum()) for gradient in expected)
    found = (difference / length) ** 0.5
    return found if math.isfinite(found) else _FAR


def _gradients(replica: Replica) -> list[Tensor]:
    torch.manual_seed(SEED + dist.get_rank())  # so that dropout draws the same masks for each contender
    # Convolutions of GPUs round to TF32 by default, which would hide differences below 1e-3.
    cudnn = torch.backends.cudnn
    kept = {"benchmark": cudnn.benchmark, "deterministic": cudnn.deterministic}
    with cudnn.flags(enabled=True, allow_tf32=False, **kept):
        replica.backward()
    gradients = replica.gradients()
    replica.module.zero_grad()
    return gradients


@dataclass(frozen=True)
class StepBudget:
    """Number of steps of a plan to measure, depending on the seconds of a step.

    Attributes:
        warm_up: number of steps that are not counted, at least one.
        seconds: approximate seconds of all counted steps together.
        min_steps: least number of counted steps.
        max_steps: maximum number of counted steps.
        single_beyond: seconds of a step above which only one step is counted; None for no limit.
    """

    warm_up: int
    seconds: float
    min_steps: int
    max_steps: int
    single_beyond: float | None = None

    def steps(self, seconds: float) -> int:
        """Number of steps to count if a step takes ``seconds``."""
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
        timeout: seconds for which exchanges wait for other ranks.

    Returns:
        By plan, seconds of each counted step on this rank. All ranks count the same number of steps.
    """
    return [_measure_plan(workload, cluster, plan, StepBudget(**budget), timeout) for plan in plans]


def _measure_plan(
    workload: dict[str, Any], cluster: dict[str, Any], plan: dict[str, Any], budget: StepBudget, timeout: float
) -> list[float]:
    with _paced(workload, cluster, plan, timeout) as replica:
        # The slowest rank decides, since all ranks must make the same number of steps.
        last = torch.tensor(replica.run(budget.warm_up)[-1], dtype=torch.float64)
        dist.all_reduce(last, dist.ReduceOp.MAX)
        return replica.run(budget.steps(float(last)))


def trace(
    workload: dict[str, Any], cluster: dict[str, Any], plan: dict[str, Any], warm_up: int, steps: int, timeout: float
) -> list[dict[str, Any]]:
    """The `StepTrace` of each of ``steps`` steps on this rank as plain data, after ``warm_up`` untraced steps."""
    with _paced(workload, cluster, plan, timeout) as replica:
        recorder, traces = Recorder(len(replica.schedule.messages)), []
        replica.run(warm_up)
        if steps:
            replica.engine.trace(recorder)
        for _ in range(steps):
            dist.barrier()  # so that the traces of all ranks start at the same moment
            recorder.begin()
            replica.step(recorder)
            traces.append(asdict(recorder.end()))
        return traces


@contextmanager
def _paced(
    workload: dict[str, Any], cluster: dict[str, Any], plan: dict[str, Any], timeout: float
) -> Iterator[PlanReplica]:
    """A replica of a plan with paced compute, open while the block runs."""
    described = Workload.from_dict(workload), ClusterSpec.from_dict(cluster)
    key = digest([workload, cluster])
    if key not in _paced_trainings:
        # Making the module takes long, and consecutive plans often share a workload. So the last module is kept.
        _paced_trainings.clear()
        _paced_trainings[key] = Training.paced(*described)
    replica = PlanReplica(_paced_trainings[key], SyncPlan.from_dict(plan), *described, timeout)
    try:
        yield replica
    finally:
        replica.close()


def profile(model: dict[str, Any]) -> dict[str, Any]:
    """The workload of a model as plain data, measured on this rank's first batch while all ranks compute.

    The plan is for a job, so touched rows travel for the same tables as in a job, however many rows this batch touches.
    """
    recipe = model_of(model)
    torch.manual_seed(SEED)
    module = recipe.module()
    batch = recipe.batches(dist.get_rank())[0]
    dist.barrier()
    found = capture(module, batch, training_step=lambda given: module(*given), name=recipe.title)
    return with_kinds_of(recipe.workload("rows"), found).to_dict()
