"""The plan of a job on GPUs: plans are measured before the first step, on gradients of zeros.

The simulator does not know how fast NCCL is, nor how fast gradients travel through host memory. So its predictions only
choose which plans are measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import seconds_text
from lightning_autosync.engine import Engine
from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.errors import OpeningError
from lightning_autosync.plan import Schedule, builders, compile_plan
from lightning_autosync.strategy.choice import LEAST_GAIN
from lightning_autosync.strategy.tuning.live import Alternative
from lightning_autosync.strategy.tuning.proposals import DDP, NATIVE, Proposals
from lightning_autosync.workload import Workload

OTHERS = 2
"""Number of plans of the search that are measured beside the backend's own."""
SECONDS = 10.0
"""Seconds that all measured passes together may take, unless this allows fewer than `LEAST_PASSES` of each plan."""
LEAST_PASSES, MOST_PASSES = 2, 6
CONNECT_TIMEOUT = 10.0
"""Seconds in which ranks must connect for a plan."""
_COPIES = 4
"""Copies of all gradients that must fit in the device's memory: parameters, gradients, buffers, and some reserve."""
_TWO_LEVEL = "hierarchical"
Parameters = Sequence[tuple[str, nn.Parameter]]


def choose_measured(
    proposals: Proposals,
    parameters: Parameters,
    workload: Workload,
    cluster: ClusterSpec,
    group: dist.ProcessGroup | None,
    two_level_collectives: bool,
    timeout: float,
) -> Proposals:
    """The plan that synchronizes gradients fastest: DDP's, or another one that is more than 5% faster; collective.

    Args:
        proposals: plans as predicted.
        parameters: names and parameters of the module, which are not changed.
        workload: the workload of these parameters.
        cluster: the cluster of the job, with known rates.
        group: the ranks; None is the default group.
        two_level_collectives: as for `compile_plan`.
        timeout: seconds that ranks wait for each other.

    Returns:
        The plan and DDP's, if that is another one, and the reason for the choice.
    """
    ddp = Alternative(builders.build(NATIVE, workload, cluster), DDP, 0.0, native=True)
    if fault := _why_not(parameters, workload, group):
        return Proposals([ddp], f"DDP's fused native all-reduce, because no plans can be measured: {fault}")
    begin = time.monotonic()
    plans = [ddp, *_candidates(proposals, workload, cluster, two_level_collectives)]
    schedules = [compile_plan(each.plan, workload, cluster, "plan", two_level_collectives) for each in plans]

    def open_engine(schedule: Schedule, copies: Parameters) -> Engine:
        return Engine(copies, schedule, group=group, cluster=cluster, timeout=timeout, connect_timeout=CONNECT_TIMEOUT)

    found = measure_schedules(schedules, parameters, open_engine, group)
    taken = time.monotonic() - begin
    measured = [replace(each, predicted=seconds) for each, seconds in zip(plans, found, strict=True) if seconds]
    return _chosen(measured, ddp, f"measured in {taken:.1f} s before the first step")


def _chosen(measured: Sequence[Alternative], ddp: Alternative, how: str) -> Proposals:
    native = next((each for each in measured if each.native), ddp)
    others = sorted((each for each in measured if not each.native), key=lambda each: each.predicted)
    if not others:
        return Proposals([native], "DDP's fused native all-reduce, because no other plan could be opened")
    best = others[0]
    times = (
        f"{how}: gradients take {seconds_text(best.predicted)}, and {seconds_text(native.predicted)} with DDP's plan"
    )
    name = "a plan that the search found" if best.name == "search" else best.name
    if native.predicted > LEAST_GAIN * best.predicted:
        return Proposals([best, native], f"{name}, {times}")
    reason = f"because no other plan is more than 5% faster; the best is {name}, {times}"
    return Proposals([native], f"DDP's fused native all-reduce, {reason}")


def _candidates(
    proposals: Proposals, workload: Workload, cluster: ClusterSpec, two_level_collectives: bool
) -> list[Alternative]:
    """Plans to measure beside DDP's."""
    found = []
    if two_level_collectives and len(cluster.nodes) > 1 and all(node.devices > 1 for node in cluster.nodes):
        found.append(Alternative(builders.build(_TWO_LEVEL, workload, cluster), _TWO_LEVEL, 0.0))
    others = [each for each in proposals.plans if not each.name.startswith(NATIVE) and each.name != _TWO_LEVEL]
    return found + sorted(others, key=lambda each: each.predicted)[:OTHERS]


def _why_not(parameters: Parameters, workload: Workload, group: dist.ProcessGroup | None) -> str:
    """The reason why no plans can be measured, the same on all ranks; empty if there is none. Collective."""
    if any(variable.kind != "dense" for variable in workload.variables):
        return "gradients of embeddings depend on the rows of real batches"
    need = _COPIES * sum(parameter.nbytes for _, parameter in parameters)
    if min(gather_json(_free_memory() - need, group)) < 0:
        return f"some device has too little free memory for {_COPIES} copies of all gradients"
    return ""


def _free_memory() -> int:
    """Bytes that this process can still allocate on the current device; a large number without a GPU."""
    if not torch.cuda.is_available():
        return 1 << 60
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return int(torch.cuda.mem_get_info()[0]) + unused


def measure_schedules(
    schedules: Sequence[Schedule],
    parameters: Parameters,
    open_engine: Callable[[Schedule, Parameters], Engine],
    group: dist.ProcessGroup | None,
) -> list[float | None]:
    """Measure how long each schedule takes to synchronize gradients of zeros, without a model; collective.

    Schedules are measured one after the other, so that only one engine's buffers are in memory, and then once more in
    reverse order, so that a slow drift of the links affects all alike.

    Args:
        schedules: schedules of the parameters.
        parameters: names and parameters. Copies of them get the gradients.
        open_engine: opens an engine for a schedule and copies of the parameters; collective.
        group: the ranks; None is the default group.

    Returns:
        Seconds of a pass of the slowest rank by schedule, the median; None where ranks cannot open it.
    """
    copies = [(name, nn.Parameter(torch.zeros_like(parameter))) for name, parameter in parameters]
    times: list[list[float]] = [[] for _ in schedules]
    budget = SECONDS / (2 * len(schedules))
    for index in (*range(len(schedules)), *reversed(range(len(schedules)))):
        try:
            engine = open_engine(schedules[index], copies)
        except OpeningError:  # on all ranks
            continue
        try:
            times[index] += _measure(copies, budget, group)
        finally:
            engine.close()
            for _, copy in copies:
                copy.grad = None
    return [statistics.median(found) if found else None for found in times]


def _measure(copies: Parameters, budget: float, group: dist.ProcessGroup | None) -> list[float]:
    """Seconds of some passes by the slowest rank, after one that is not counted; collective."""
    passes = min(MOST_PASSES, max(LEAST_PASSES, int(budget / max(_slowest([_pass(copies)], group)))))
    return _slowest([_pass(copies) for _ in range(passes)], group)


def _slowest(own: list[float], group: dist.ProcessGroup | None) -> list[float]:
    return [max(times) for times in zip(*gather_json(own, group), strict=True)]


def _pass(copies: Parameters) -> float:
    """Seconds of a backward pass that gives each copy a gradient of zeros, with all sums."""
    device = copies[0][1].device
    _wait(device)
    begin = time.perf_counter()
    # Like layers of a model: the last parameter's gradient comes first.
    values = [copy.view_as(copy) for _, copy in copies]
    torch.autograd.backward(values, [value.new_zeros(()).expand_as(value) for value in values])
    _wait(device)
    return time.perf_counter() - begin


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
