"""``overlap="step"`` beside DDP and beside the engine without overlap, on emulated equal links; needs root.

    python -m tests.benchmarks.step_overlap [ROUNDS] [MBIT_PER_SECOND] [MODEL ...]

Four ranks, each on a link of 1000 Mbit/s by default. A model of the catalogue is scaled to 28 MB, with dense gradients
of embeddings, and its computation is paced layer by layer to take as long as its gradients need on the wire. A layer's
time includes that of copying its gradients. SGD steps the real parameters. DDP first runs with several bucket caps. Its
fastest then takes turns with the computation alone, which has no synchronization, and with the engine, without overlap
and with it. The engine's plan is the one by which a job with ``AutoSyncStrategy(overlap="step")`` begins on these
links, before it knows its computation.
Gradients of all contenders are views of their buffers. The first step of each turn is not timed, so that timed steps
begin and end with the same sums under way. The table has the median milliseconds of a step of the slowest rank, the
speedups of overlap, the step that the replay predicts with overlap, and bounds: of steps that wait, and of steps that
overlap.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine import Engine, StepOverlap, defer_steps
from lightning_autosync.engine.engine import Waits
from lightning_autosync.measure.conditions import usable_cores
from lightning_autosync.measure.emulation.launch import EmulatedLaunch
from lightning_autosync.measure.models.model import with_kind
from lightning_autosync.measure.workers import WorkerPool
from lightning_autosync.plan import SyncPlan, compile_plan
from lightning_autosync.plan.schedule import first_parameters_first
from lightning_autosync.replay import (
    Constants,
    Replay,
    least_overlapped_step,
    least_step,
    overlapped_step_time,
    synchronization_bound,
)
from lightning_autosync.strategy.gain import choose_without_trials
from lightning_autosync.strategy.tuning.settings import TuningSettings
from lightning_autosync.workload import Variable, Workload, catalogue, variable_names
from lightning_autosync.workload.scaling import scaled, with_compute

MODELS = ("vgg16", "gpt")
BYTES = 28e6
FRAMING = 1514 / 1448
CAPS = (1, 2, 5, 10, 25)
STEPS = 4


class PacedLayer(nn.Module):
    """The parameters of one layer; its passes sleep, and its gradients are copies of what is drawn once.

    Args:
        variables: its parameters, whose names end in the last part of the variables' names.
        forward_time, backward_time: seconds of its passes, with the copies.
    """

    def __init__(self, variables: Sequence[Variable], forward_time: float, backward_time: float) -> None:
        super().__init__()
        for variable in variables:
            self.register_parameter(variable.name.rpartition(".")[2], nn.Parameter(torch.zeros(variable.shape)))
        self.gradients = [torch.rand_like(parameter) for parameter in self.parameters()]
        self.times = forward_time, backward_time

    def forward(self, value: Tensor) -> Tensor:
        started = time.perf_counter()
        value = _Layer.apply(value, self, *self.parameters())
        _pace(started + self.times[0])
        return value


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: Tensor, layer: PacedLayer, *_: Tensor) -> Tensor:
        context.layer = layer
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(context: Any, output: Tensor) -> tuple[Tensor | None, ...]:
        started = time.perf_counter()
        # Autograd takes these tensors as they are. It would copy those of the layer, beside the paced time.
        gradients = [gradient.clone() for gradient in context.layer.gradients]
        _pace(started + context.layer.times[1])
        return output, None, *gradients


_late = 0.0
"""Seconds by which the last pass of a layer ended late."""


def _pace(end: float) -> None:
    """Sleep until the time at which the pass of a layer ends.

    A pass that ends late, because ranks share cores and wake up late, shortens the next one.
    """
    global _late
    end -= _late
    time.sleep(max(0.0, end - time.perf_counter()))
    _late = time.perf_counter() - end


class PacedLayers(nn.Module):
    """A workload as a chain of layers, in the order of its variables."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        layers: dict[str, list[Variable]] = {}
        for variable in workload.variables:
            layers.setdefault(variable.name.rpartition(".")[0], []).append(variable)
        ends = [max(variable.ready or 0.0 for variable in members) for members in layers.values()]
        spans = [max(0.0, end - later) for end, later in pairwise([*ends, 0.0])]
        stretch = workload.backward_time / sum(spans)
        ratio = workload.forward_time / workload.backward_time
        self.layers = nn.ModuleDict(
            {
                name.replace(".", "/"): PacedLayer(members, span * stretch * ratio, span * stretch)
                for (name, members), span in zip(layers.items(), spans, strict=True)
            }
        )

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers.values():
            value = layer(value)
        return value.sum()


_live: dict[str, Any] = {}


def equal_links(rate: int) -> ClusterSpec:
    """Four nodes on one switch, with links of ``rate`` Mbit/s."""
    return ClusterSpec.uniform(nodes=4, bandwidth=f"{rate} Mbit/s", name="four_equal")


def set_up(
    name: str,
    workload: dict[str, Any],
    rate: int,
    kind: Literal["alone", "ddp", "engine"],
    cap: float | None = None,
    plan: dict[str, Any] | None = None,
    overlap: bool = False,
) -> None:
    """Make a contender: no synchronization, DDP with a bucket ``cap`` in MiB, or the engine with a ``plan``."""
    described, cluster = Workload.from_dict(workload), equal_links(rate)
    torch.manual_seed(0)
    module: nn.Module = PacedLayers(described)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    closing: list[Any] = []
    called = module
    if kind == "ddp":
        called = DistributedDataParallel(module, bucket_cap_mb=cap, gradient_as_bucket_view=True, static_graph=True)
    elif plan is not None:
        # The module's names differ from the workload's, in which the plan is made.
        names = [variable.name for variable in described.variables]
        renamed = [(name, parameter) for name, (_, parameter) in zip(names, variable_names(module), strict=True)]
        schedule = compile_plan(SyncPlan.from_dict(plan), described, cluster)
        if overlap:
            schedule = first_parameters_first(schedule, names)
        waits: Waits = "parameters" if overlap else "backward"
        engine = Engine(renamed, schedule, cluster=cluster, timeout=60.0, waits=waits, gradient_as_bucket_view=True)
        closing.append(engine)
        if overlap:
            steps = StepOverlap(module)
            steps.follow(engine)
            assert not defer_steps(optimizer)
            closing.insert(0, steps)
    _live[name] = called, optimizer, closing


def measure(name: str, steps: int) -> list[float]:
    """Seconds of each step, after one that does not count; sums of the last one may still be under way at its end."""
    called, optimizer, closing = _live[name]
    value = torch.zeros((), requires_grad=True)
    dist.barrier()
    times = []
    for _ in range(steps + 1):
        called(value).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
    if closing and isinstance(closing[0], StepOverlap):
        closing[0].settle()
    return [end - start for start, end in pairwise(times)]


def close(name: str) -> None:
    """Remove a contender."""
    for each in _live.pop(name)[2]:
        each.close()


def slowest(found: list[list[float]]) -> float:
    """Mean seconds of a step, by the rank that took longest."""
    return max(sum(steps) / len(steps) for steps in found)


def compare(
    pool: WorkerPool, workload: Workload, plan: SyncPlan, rate: int, rounds: int
) -> tuple[str, dict[str, float]]:
    """The name of the fastest DDP, and the median seconds of a step by contender."""
    given = {"workload": workload.to_dict(), "rate": rate}
    caps = [f"ddp {cap}" for cap in CAPS]
    for name, cap in zip(caps, CAPS, strict=True):
        pool.run(set_up, name=name, kind="ddp", cap=cap, **given)
    swept = take_turns(pool, caps, rounds=2, steps=2)
    best = min(caps, key=lambda name: swept[name])
    for name in set(caps) - {best}:
        pool.run(close, name=name)
    pool.run(set_up, name="alone", kind="alone", **given)
    for name in ("waits", "overlaps"):
        pool.run(set_up, name=name, kind="engine", plan=plan.to_dict(), overlap=name == "overlaps", **given)
    names = [best, "alone", "waits", "overlaps"]
    found = take_turns(pool, names, rounds, STEPS)
    for name in names:
        pool.run(close, name=name)
    return best, found


def take_turns(pool: WorkerPool, names: Sequence[str], rounds: int, steps: int) -> dict[str, float]:
    """The median seconds of a step by contender, after one turn that does not count."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        pool.run(measure, name=name, steps=1)
    for number in range(rounds):
        for name in names if number % 2 == 0 else names[::-1]:
            found[name].append(slowest(pool.run(measure, name=name, steps=steps)))
    return {name: statistics.median(times) for name, times in found.items()}


HEADINGS = (
    "model", "DDP (cap)", "waits", "overlap", "over DDP", "over waits", "predicted", "alone", "bound, waits", "bound",
)  # fmt: skip


def main(rounds: int = 6, rate: int = 1000, *models: str) -> None:
    """Measure, and print a table."""
    cluster, constants = equal_links(rate), Constants(cores=usable_cores())
    table = Table(*HEADINGS, title=f"milliseconds of a step on four equal links of {rate} Mbit/s")
    here = [Path(__file__).parents[2]]
    with EmulatedLaunch(cluster) as launch, WorkerPool(4, launch, extra_paths=here) as pool:
        for model in models or MODELS:
            workload = catalogue.build(model)
            workload = with_kind(workload, {variable.name for variable in workload.variables}, "dense")
            workload = scaled(workload, BYTES / workload.bytes)
            workload = with_compute(workload, synchronization_bound(workload, cluster, FRAMING))
            plan, reason = choose_without_trials(workload, cluster, constants, TuningSettings(), overlaps=True)
            schedule = compile_plan(plan, workload, cluster)
            predicted = overlapped_step_time(schedule, workload, Replay(workload, cluster, constants))
            best, found = compare(pool, workload, plan, rate, rounds)
            bounds = least_step(workload, cluster, FRAMING).seconds, least_overlapped_step(workload, cluster, FRAMING)
            times = (found["waits"], found["overlaps"])
            pairs = ((best, "overlaps"), ("waits", "overlaps"))
            table.add_row(
                model,
                f"{1e3 * found[best]:.0f} ({best.split()[1]})",
                *(f"{1e3 * seconds:.0f}" for seconds in times),
                *(f"{found[one] / found[other]:.2f}" for one, other in pairs),
                *(f"{1e3 * seconds:.0f}" for seconds in (predicted, found["alone"], *bounds)),
            )
            print(f"{model}: {reason}\n{found}, predicted {predicted:.3f}", flush=True)
    Console(width=140).print(table)


if __name__ == "__main__":
    # Workers import the functions by name, from a module that is not the main one.
    from tests.benchmarks import step_overlap

    step_overlap.main(*(int(each) for each in sys.argv[1:3]), *sys.argv[3:])
