"""The plan of a job on GPUs, if its user asks for that: plans are measured before the first step.

The simulator does not know how fast NCCL is, nor how fast gradients travel through host memory. So its predictions only
choose which plans are measured.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import seconds_text
from lightning_autosync.engine import Engine
from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.errors import OpeningError
from lightning_autosync.plan import Schedule, SyncPlan, builders, compile_plan
from lightning_autosync.plan.builders.default import is_native
from lightning_autosync.step_times import job_steps
from lightning_autosync.strategy.choice import LEAST_GAIN, choose_plan
from lightning_autosync.strategy.tuning.live import Alternative
from lightning_autosync.strategy.tuning.proposals import DDP, Proposals
from lightning_autosync.workload import Workload

OTHERS = 2
"""Number of plans of the search that are measured beside the backend's own."""
SECONDS = 10.0
"""Seconds of measured passes after which no second turn begins."""
VISIT = 1.0
"""Approximate seconds of the passes of a plan in one turn, unless this allows fewer than `LEAST_PASSES`."""
LEAST_PASSES, MOST_PASSES = 2, 6
GIVE_UP = 1.5
CONNECT_TIMEOUT = 10.0
"""Seconds in which ranks must connect for a plan."""
_TWO_LEVEL = "hierarchical"
_NATIVE = "fused native all-reduce"
Parameters = Sequence[tuple[str, nn.Parameter]]


def choose_measured(
    proposals: Proposals,
    parameters: Parameters,
    workload: Workload,
    cluster: ClusterSpec,
    group: dist.ProcessGroup | None,
    two_level_collectives: bool,
    timeout: float,
    bucket_bytes: int | None = None,
) -> Proposals:
    """The backend's fused all-reduce, or a plan that synchronizes gradients more than 5% faster; collective.

    A plan must be faster both without computation and beside a backward pass that takes as long as the sums.

    Args:
        proposals: plans as predicted.
        parameters: names and parameters of the module, which are not changed.
        cluster: the cluster of the job, with known rates.
        group: the ranks; None is the default group.
        two_level_collectives: as for `compile_plan`.
        timeout: seconds that ranks wait for each other.
        bucket_bytes: bytes of a fused message; None for the builders' own size.

    Returns:
        The plan and the backend's, if that is another one, and the reason for the choice.
    """
    plan, _ = choose_plan(workload, cluster, known=False, bucket_bytes=bucket_bytes, accelerated=True)
    native = Alternative(plan, DDP, _predicted(plan, proposals), native=True)
    if any(variable.kind != "dense" for variable in workload.variables):
        return _unmeasured(native, "gradients of embeddings depend on the rows of real batches")
    copies, fault = _copies(parameters)
    if fault := next(filter(None, gather_json(fault, group)), ""):
        return _unmeasured(native, fault)
    plans = [native, *_candidates(proposals, workload, cluster, two_level_collectives, bucket_bytes)]
    if len(plans) == 1:
        return Proposals([native], f"{_NATIVE}, because there is no other plan to measure")
    begin = time.monotonic()
    schedules = [compile_plan(each.plan, workload, cluster, "plan", two_level_collectives) for each in plans]

    def open_engine(schedule: Schedule) -> Engine:
        return Engine(copies, schedule, group=group, cluster=cluster, timeout=timeout, connect_timeout=CONNECT_TIMEOUT)

    alone = measure_schedules(schedules, copies, open_engine, group)
    faster = [0, *(index for index, seconds in enumerate(alone) if _gains(seconds, alone[0]))]
    beside = dict.fromkeys(range(len(plans)), math.inf)
    if len(faster) > 1:
        # Most messages travel beside the backward pass. A plan that is faster without one may be slower with one.
        again = measure_schedules([schedules[index] for index in faster], copies, open_engine, group, alone[0])
        beside.update(zip(faster, again, strict=True))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # so that the first step finds the device's memory as it was
    measured = [Measured(plan, alone[index], beside[index]) for index, plan in enumerate(plans)]
    return _chosen(measured, f"measured in {time.monotonic() - begin:.1f} s before the first step")


@dataclass(frozen=True)
class Measured:
    """A plan and what it was measured to take.

    Attributes:
        alone: seconds to synchronize all gradients; infinite if ranks could not open the plan.
        beside: seconds of a backward pass, with all sums, that takes as long as the backend's all-reduce needs alone;
            infinite if it was not measured.
    """

    plan: Alternative
    alone: float
    beside: float = math.inf


def _gains(seconds: float, native: float) -> bool:
    """Whether a plan is more than 5% faster than the backend's all-reduce, by their seconds."""
    return native > LEAST_GAIN * seconds


def _chosen(measured: Sequence[Measured], how: str) -> Proposals:
    """The fastest plan, from measurements of the backend's all-reduce, which comes first, and of others."""
    native, *others = measured
    best = min(others, key=lambda each: (each.beside, each.alone))
    if best.alone == math.inf:
        return Proposals([native.plan], f"{_NATIVE}, because no other plan could be opened")
    one, other = seconds_text(best.alone), seconds_text(native.alone)
    times = f"{how}: gradients take {one}, and {other} with the native all-reduce"
    if best.beside < math.inf:
        one, other = seconds_text(best.beside), seconds_text(native.beside)
        times += f"; with a backward pass as long as that, {one} and {other}"
    if _gains(best.beside, native.beside):
        return Proposals([best.plan, native.plan], f"{best.plan.name}, {times}")
    reason = f"because no other plan is more than 5% faster. The best is {best.plan.name}, {times}"
    return Proposals([native.plan], f"{_NATIVE}, {reason}")


def _unmeasured(native: Alternative, fault: str) -> Proposals:
    return Proposals([native], f"{_NATIVE}, because no plans can be measured: {fault}")


def _candidates(
    proposals: Proposals,
    workload: Workload,
    cluster: ClusterSpec,
    two_level_collectives: bool,
    bucket_bytes: int | None = None,
) -> list[Alternative]:
    """Plans to measure beside the backend's all-reduce."""
    found = []
    if two_level_collectives and len(cluster.nodes) > 1 and all(node.devices > 1 for node in cluster.nodes):
        sizes = {} if bucket_bytes is None else {"bucket_bytes": bucket_bytes}
        plan = builders.build(_TWO_LEVEL, workload, cluster, **sizes)
        found.append(Alternative(plan, _TWO_LEVEL, _predicted(plan, proposals)))
    # Measurements do not tell whether overlap pays, so a user who asked for it gets it.
    overlapping = [each for each in proposals.plans if not each.plan.waits]
    others = [each for each in overlapping if not is_native(each.name) and each.name != _TWO_LEVEL]
    return found + sorted(others, key=lambda each: each.predicted)[:OTHERS]


def _predicted(plan: SyncPlan, proposals: Proposals) -> float:
    """Predicted seconds of the same plan among ``proposals``; NaN if it is not among them."""
    same = (each.predicted for each in proposals.plans if each.plan.fingerprint == plan.fingerprint)
    return next(same, math.nan)


def _copies(parameters: Parameters) -> tuple[Parameters, str]:
    """Parameters of zeros with gradients of zeros, or the reason why this rank cannot have them.

    All memory of the passes is taken here, because a rank that lacks memory later would leave the others waiting.
    """
    try:
        found = [(name, nn.Parameter(torch.zeros_like(parameter))) for name, parameter in parameters]
        for _, copy in found:
            copy.grad = torch.zeros_like(copy)
    except torch.OutOfMemoryError:
        return [], "a device has too little free memory for copies of all parameters and gradients"
    return found, ""


def measure_schedules(
    schedules: Sequence[Schedule],
    copies: Parameters,
    open_engine: Callable[[Schedule], Engine],
    group: dist.ProcessGroup | None,
    backward: float = 0.0,
) -> list[float]:
    """Measure how long each schedule takes to synchronize gradients of zeros, without a model; collective.

    Schedules are measured one after the other, so that only one engine's buffers are in memory, and then once more in
    reverse order, so that a slow drift of the links affects all alike. The second turn is left out for schedules that
    take 1.5 times as long as the first one, and for all if the first turn took `SECONDS`.

    Args:
        schedules: schedules of the parameters.
        copies: names and parameters with gradients of zeros.
        open_engine: opens an engine for a schedule of these parameters; collective.
        group: the ranks; None is the default group.
        backward: seconds in which the gradients appear, one after the other, as in a backward pass.

    Returns:
        Seconds of a pass by schedule, the median; infinite where ranks cannot open it.
    """
    times: list[list[float]] = [_visit(each, copies, open_engine, group, backward) for each in schedules]
    limit = GIVE_UP * _median(times[0])
    if sum(map(sum, times)) < SECONDS:
        for index in reversed(range(len(schedules))):
            if _median(times[index]) <= limit:
                times[index] += _visit(schedules[index], copies, open_engine, group, backward)
    return [_median(each) for each in times]


def _median(times: Sequence[float]) -> float:
    return statistics.median(times) if times else math.inf


def _visit(
    schedule: Schedule,
    copies: Parameters,
    open_engine: Callable[[Schedule], Engine],
    group: dist.ProcessGroup | None,
    backward: float,
) -> list[float]:
    """Seconds of some passes of the job, after two that do not count; none if ranks cannot open the plan."""
    try:
        engine = open_engine(schedule)
    except OpeningError:  # on all ranks
        return []
    try:
        _pass(copies, backward)  # the first one may connect ranks, or take memory
        first = max(_of_job([_pass(copies, backward)], group))
        passes = min(MOST_PASSES, max(LEAST_PASSES, int(VISIT / first)))
        return _of_job([_pass(copies, backward) for _ in range(passes)], group)
    finally:
        engine.close()
        del engine
        gc.collect()  # the engine is in cycles, and its buffers may be most of the device's memory


def _of_job(own: list[float], group: dist.ProcessGroup | None) -> list[float]:
    return job_steps(gather_json(own, group))


def _pass(copies: Parameters, backward: float) -> float:
    """Seconds of a backward pass that gives each copy a gradient of zeros, with all sums."""
    device = copies[0][1].device
    _wait(device)
    begin = time.perf_counter()
    # Like layers of a model: the last parameter's gradient comes first.
    pace = backward / sum(copy.nbytes for _, copy in copies)
    with torch.enable_grad():
        values = [_Paced.apply(copy, pace * copy.nbytes) for _, copy in copies]
        torch.autograd.backward(values, [value.new_zeros(()).expand_as(value) for value in values])
    _wait(device)
    return time.perf_counter() - begin


class _Paced(torch.autograd.Function):
    """Passes a parameter on; its gradient takes some seconds."""

    @staticmethod
    def forward(context: Any, value: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if context.seconds:
            time.sleep(context.seconds)
        return gradient, None


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
