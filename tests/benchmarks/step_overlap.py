"""``overlap="step"`` beside DDP and beside the engine without overlap, on emulated equal links; needs root.

    python -m tests.benchmarks.step_overlap [ROUNDS] [MODEL ...]

Four ranks, each on a link of 1 Gbit/s. A model of the catalogue is scaled to 28 MB, and its computation is paced layer
by layer to take as long as its gradients need on the wire. SGD steps the real parameters. DDP first runs with several
bucket caps, with gradients as views of the buckets. Its fastest then takes turns with the engine: on trees without
overlap and with it, and with overlap on the backend's own all-reduces. The table has the median milliseconds of a step
of the slowest rank, the speedups of overlap, and the larger one of computation and wire, which no method with the same
bytes can beat.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

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
from lightning_autosync.measure.emulation.launch import EmulatedLaunch
from lightning_autosync.measure.workers import WorkerPool
from lightning_autosync.plan import compile_plan
from lightning_autosync.plan.builders.all_reduce import all_reduce
from lightning_autosync.plan.builders.default import LINK_BUCKET, link_method
from lightning_autosync.plan.schedule import first_parameters_first
from lightning_autosync.replay.bound import synchronization_bound
from lightning_autosync.workload import Variable, Workload, catalogue, variable_names
from lightning_autosync.workload.scaling import scaled, with_compute

MODELS = ("vgg16", "gpt")
CLUSTER = {"format": "autosync-cluster/1", "name": "four_equal", "uniform": {"nodes": 4, "bandwidth": "1 Gbit/s"}}
BYTES = 28e6
FRAMING = 1514 / 1448
CAPS = (1, 2, 5, 10, 25)
NATIVE_BUCKET = 2 * 2**20
STEPS = 4


class PacedLayer(nn.Module):
    """The parameters of one layer; its passes sleep and its gradients are drawn once.

    Args:
        variables: its parameters, whose names end in the last part of the variables' names.
        forward_time, backward_time: seconds of its passes.
    """

    def __init__(self, variables: Sequence[Variable], forward_time: float, backward_time: float) -> None:
        super().__init__()
        for variable in variables:
            self.register_parameter(variable.name.rpartition(".")[2], nn.Parameter(torch.zeros(variable.shape)))
        self.gradients = [torch.rand_like(parameter) for parameter in self.parameters()]
        self.times = forward_time, backward_time

    def forward(self, value: Tensor) -> Tensor:
        _sleep(self.times[0])
        return _Layer.apply(value, self, *self.parameters())


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: Tensor, layer: PacedLayer, *_: Tensor) -> Tensor:
        context.layer = layer
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(context: Any, output: Tensor) -> tuple[Tensor | None, ...]:
        _sleep(context.layer.times[1])
        return output, None, *(gradient.detach() for gradient in context.layer.gradients)


def _sleep(seconds: float) -> None:
    time.sleep(max(0.0, seconds))


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


def set_up(
    name: str, workload: dict[str, Any], cap: float | None = None, overlap: bool = False, native: bool = False
) -> None:
    """Make a contender: DDP if ``cap`` is given, otherwise the engine, on trees or ``native`` all-reduces."""
    described, cluster = Workload.from_dict(workload), ClusterSpec.from_dict(CLUSTER)
    torch.manual_seed(0)
    module: nn.Module = PacedLayers(described)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    closing: list[Any] = []
    called = module
    if cap is not None:
        called = DistributedDataParallel(module, bucket_cap_mb=cap, gradient_as_bucket_view=True, static_graph=True)
    else:
        parameters = variable_names(module)
        # The module's names differ from the workload's, in which the plan is made.
        names = [variable.name for variable in described.variables]
        renamed = [(name, parameter) for name, (_, parameter) in zip(names, parameters, strict=True)]
        plan = link_method(described, cluster).build(described, cluster, bucket_bytes=LINK_BUCKET)
        if native:
            plan = all_reduce(described, cluster, bucket_bytes=NATIVE_BUCKET)
        schedule = compile_plan(plan, described, cluster)
        if overlap:
            schedule = first_parameters_first(schedule, names)
        waits: Waits = "parameters" if overlap else "backward"
        engine = Engine(renamed, schedule, cluster=cluster, timeout=60.0, waits=waits)
        closing.append(engine)
        if overlap:
            steps = StepOverlap(module)
            steps.follow(engine)
            assert not defer_steps(optimizer)
            closing.insert(0, steps)
    _live[name] = called, optimizer, closing


def measure(name: str, steps: int) -> list[float]:
    """Seconds of each step; the last one ends when all parameters have their values."""
    called, optimizer, closing = _live[name]
    value = torch.zeros((), requires_grad=True)
    dist.barrier()
    times = [time.perf_counter()]
    for number in range(steps):
        called(value).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == steps - 1 and closing and isinstance(closing[0], StepOverlap):
            closing[0].settle()
        times.append(time.perf_counter())
    return [end - start for start, end in pairwise(times)]


def close(name: str) -> None:
    """Remove a contender."""
    for each in _live.pop(name)[2]:
        each.close()


def slowest(found: list[list[float]]) -> float:
    """Mean seconds of a step, by the rank that took longest."""
    return max(sum(steps) / len(steps) for steps in found)


def compare(pool: WorkerPool, workload: Workload, rounds: int) -> dict[str, float]:
    document = workload.to_dict()
    for cap in CAPS:
        pool.run(set_up, name=f"ddp {cap}", workload=document, cap=cap)
        pool.run(measure, name=f"ddp {cap}", steps=3)
    swept = {
        f"ddp {cap}": statistics.median(slowest(pool.run(measure, name=f"ddp {cap}", steps=2)) for _ in range(3))
        for cap in CAPS
    }
    best = min(swept, key=lambda name: swept[name])
    for name in set(swept) - {best}:
        pool.run(close, name=name)
    pool.run(set_up, name="waits", workload=document)
    pool.run(set_up, name="overlaps", workload=document, overlap=True)
    pool.run(set_up, name="native", workload=document, overlap=True, native=True)
    names = [best, "waits", "overlaps", "native"]
    found: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        pool.run(measure, name=name, steps=2)
    for number in range(rounds):
        for name in names if number % 2 == 0 else names[::-1]:
            found[name].append(slowest(pool.run(measure, name=name, steps=STEPS)))
    for name in names:
        pool.run(close, name=name)
    medians = {name: statistics.median(times) for name, times in found.items()}
    return {"cap": float(best.split()[1]), "ddp": medians[best], **{name: medians[name] for name in names[1:]}}


def main(rounds: int = 12, *models: str) -> None:
    cluster = ClusterSpec.from_dict(CLUSTER)
    table = Table(title="steps on four equal links of 1 Gbit/s")
    for heading in (
        "model",
        "DDP (cap)",
        "waits",
        "overlap",
        "native",
        "over DDP",
        "native over DDP",
        "over waits",
        "max",
    ):
        table.add_column(heading)
    here = [Path(__file__).parents[2]]
    with EmulatedLaunch(cluster) as launch, WorkerPool(4, launch, extra_paths=here, scheduling="batch") as pool:
        for model in models or MODELS:
            workload = catalogue.build(model)
            workload = scaled(workload, BYTES / workload.bytes)
            wire = synchronization_bound(workload, cluster, FRAMING)
            found = compare(pool, with_compute(workload, wire), rounds)
            cells = (
                f"{1e3 * found['ddp']:.0f} ({found['cap']:g})",
                f"{1e3 * found['waits']:.0f}",
                f"{1e3 * found['overlaps']:.0f}",
                f"{1e3 * found['native']:.0f}",
                f"{found['ddp'] / found['overlaps']:.2f}",
                f"{found['ddp'] / found['native']:.2f}",
                f"{found['waits'] / found['overlaps']:.2f}",
                f"{1e3 * wire:.0f}",
            )
            table.add_row(model, *cells)
            print(model, found, flush=True)
    Console(width=120).print(table)


if __name__ == "__main__":
    # Workers import the functions by name, from a module that is not the main one.
    from tests.benchmarks import step_overlap

    step_overlap.main(*(int(each) for each in sys.argv[1:2]), *sys.argv[2:])
