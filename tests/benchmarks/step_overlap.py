"""``overlap="step"`` beside DDP and beside the engine without overlap, on emulated links; needs root.

    python -m tests.benchmarks.step_overlap
        [rounds=4] [rate=1000] [clusters=four_equal] [ddp=true] [seconds=0.351] [clip=false] [trials=0] [real=false]
        [MODEL ...]

``clusters`` are shipped ones; their fastest link has ``rate`` Mbit/s. A model of the catalogue is scaled so that its
gradients need so many ``seconds`` on the links, with dense gradients of embeddings. Its computation is paced layer by
layer to take as long. A layer's time includes that of copying its gradients. SGD steps the real parameters. DDP first
runs with several bucket caps. Its fastest then takes turns with the computation alone, which has no synchronization,
and with the engine, without overlap and with it. ``ddp=false`` leaves DDP out. The engine's plan is the one by which a
job with ``AutoSyncStrategy(overlap="step")`` begins on these links, before it knows its computation. It is predicted
with the costs of these hosts, which the workers measure.

With ``clip=true``, all contenders clip gradients by their norm before each step: with overlap by the sums of the roots,
otherwise by ``clip_grad_norm_``.

With ``real=true``, layers do not sleep: they multiply matrices, as many as take their time on an idle core. There
should be a core for each rank then.

With ``trials=150``, the engine's contenders are whole jobs with `AutoSyncFabricStrategy` that tune themselves, with
``overlap="step"`` and without. They first make so many steps, which they do not share with others, and then say what
they have found. These do not clip.

Gradients of all contenders are views of their buffers. The first step of each turn is not timed, so that timed steps
begin and end with the same sums under way. The table has the median milliseconds of a step of the slowest rank; the
speedups of overlap, over DDP with the smallest and the largest ratio of a round; the step that the replay predicts with
overlap, with the computation as measured; and bounds: of steps that wait, and of steps that overlap. The latter is at
least the computation alone.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

from lightning_autosync import AutoSyncFabricStrategy
from lightning_autosync.cluster import ClusterSpec, resolve_cluster
from lightning_autosync.engine import Engine, StepOverlap, defer_steps
from lightning_autosync.engine.engine import Waits
from lightning_autosync.errors import AutoSyncError
from lightning_autosync.measure.emulation.launch import EmulatedLaunch
from lightning_autosync.measure.hosts import measured_hosts
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
from tests.benchmarks.arguments import read_arguments

MODELS = ("vgg16", "resnet50", "densenet121", "bert_base", "gpt")
FRAMING = 1514 / 1448
CAPS = (1, 2, 5, 10, 25)
"""MiB of DDP's buckets."""
STEPS = 4


class PacedLayer(nn.Module):
    """The parameters of one layer; its passes sleep or compute, and its gradients are copies of what is drawn once.

    Args:
        variables: its parameters, whose names end in the last part of the variables' names.
        forward_time, backward_time: seconds of its passes, with the copies.
        product: seconds of a product of matrices on an idle core, to compute for as long; None sleeps.
    """

    def __init__(
        self, variables: Sequence[Variable], forward_time: float, backward_time: float, product: float | None
    ) -> None:
        super().__init__()
        for variable in variables:
            self.register_parameter(variable.name.rpartition(".")[2], nn.Parameter(torch.zeros(variable.shape)))
        self.gradients = [torch.rand_like(parameter) for parameter in self.parameters()]
        self.times, self.product = (forward_time, backward_time), product

    def forward(self, value: Tensor) -> Tensor:
        started = time.perf_counter()
        value = _Layer.apply(value, self, *self.parameters())
        self.spend(started, self.times[0])
        return value

    def spend(self, started: float, seconds: float) -> None:
        """Sleep until so many seconds after ``started``, or compute for as long as an idle core would."""
        if self.product is None:
            _pace(started + seconds)
        else:
            _multiply(round(seconds / self.product))


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
        context.layer.spend(started, context.layer.times[1])
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


_MATRIX = torch.rand(128, 128)


def _multiply(count: int) -> None:
    for _ in range(count):
        torch.mm(_MATRIX, _MATRIX)


def time_product() -> float:
    """Seconds of a product of matrices on this core: the least of five means."""
    means = []
    for _ in range(5):
        started = time.perf_counter()
        _multiply(200)
        means.append((time.perf_counter() - started) / 200)
    return min(means)


class PacedLayers(nn.Module):
    """A workload as a chain of layers, in the order of its variables; ``product`` as for `PacedLayer`."""

    def __init__(self, workload: Workload, product: float | None = None) -> None:
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
                name.replace(".", "/"): PacedLayer(members, span * stretch * ratio, span * stretch, product)
                for (name, members), span in zip(layers.items(), spans, strict=True)
            }
        )

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers.values():
            value = layer(value)
        return value.sum()


_live: dict[str, Any] = {}
MAX_NORM = 1.0


def set_up(
    name: str,
    workload: dict[str, Any],
    cluster: dict[str, Any],
    kind: Literal["alone", "ddp", "engine", "job"],
    cap: float | None = None,
    plan: dict[str, Any] | None = None,
    overlap: bool = False,
    product: float | None = None,
) -> None:
    """Make a contender: no synchronization, DDP with a bucket ``cap`` in MiB, the engine with a ``plan``, or a job."""
    described = Workload.from_dict(workload)
    torch.manual_seed(0)
    module: nn.Module = PacedLayers(described, product)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    closing: list[Any] = []
    called = module
    if kind == "ddp":
        called = DistributedDataParallel(module, bucket_cap_mb=cap, gradient_as_bucket_view=True, static_graph=True)
    elif kind == "job":
        os.environ |= {"LOCAL_RANK": "0", "GROUP_RANK": os.environ["RANK"]}
        strategy = AutoSyncFabricStrategy(
            cluster=ClusterSpec.from_dict(cluster),
            overlap="step" if overlap else None,
            tuning=TuningSettings(cache=None),
            gradient_as_bucket_view=True,
        )
        ranks = dist.get_world_size()
        fabric = Fabric(
            accelerator="cpu", num_nodes=ranks, devices=1, strategy=strategy, plugins=[TorchElasticEnvironment()]
        )
        fabric.launch()
        called, optimizer = fabric.setup(module, optimizer)
        closing.append(strategy)
    elif plan is not None:
        # The module's names differ from the workload's, in which the plan is made.
        names = [variable.name for variable in described.variables]
        renamed = [(name, parameter) for name, (_, parameter) in zip(names, variable_names(module), strict=True)]
        links = ClusterSpec.from_dict(cluster)
        schedule = compile_plan(SyncPlan.from_dict(plan), described, links)
        if overlap:
            schedule = first_parameters_first(schedule, names)
        waits: Waits = "parameters" if overlap else "backward"
        engine = Engine(renamed, schedule, cluster=links, timeout=60.0, waits=waits, gradient_as_bucket_view=True)
        closing.append(engine)
        if overlap:
            steps = StepOverlap(module)
            steps.follow(engine)
            assert not defer_steps(optimizer)
            closing.insert(0, steps)
    _live[name] = called, optimizer, closing


def measure(name: str, steps: int, clip: bool = False) -> list[float]:
    """Seconds of each step, after one that does not count; sums of the last one may still be under way at its end."""
    called, optimizer, closing = _live[name]
    parameters = list(called.parameters())
    value = torch.zeros((), requires_grad=True)
    dist.barrier()
    times = []
    for _ in range(steps + 1):
        called(value).backward()
        if clip:
            early = closing[0].clip_by_norm(parameters, MAX_NORM) if name == "overlaps" else None
            if early is None:
                nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
    if closing and isinstance(closing[0], (StepOverlap, AutoSyncFabricStrategy)):
        closing[0].settle()
    return [end - start for start, end in pairwise(times)]


def close(name: str) -> None:
    """Remove a contender."""
    for each in _live.pop(name)[2]:
        each.teardown() if isinstance(each, AutoSyncFabricStrategy) else each.close()


def told(name: str) -> str:
    """What a job says of its tuning."""
    return str(_live[name][2][0].report()[0])


def slowest(found: list[list[float]]) -> float:
    """Mean seconds of a step, by the rank that took longest."""
    return max(sum(steps) / len(steps) for steps in found)


def compare(
    pool: WorkerPool,
    workload: Workload,
    cluster: ClusterSpec,
    plan: SyncPlan,
    rounds: int,
    with_ddp: bool,
    clip: bool,
    trials: int,
    real: bool,
) -> dict[str, list[float]]:
    """Seconds of a step in each round, by contender; the fastest DDP is called by its cap.

    Args:
        trials: steps of jobs that tune themselves before those that are timed; 0 for the engine with ``plan``.
        real: whether layers compute.
    """
    product = max(pool.run(time_product)) if real else None
    given = {"workload": workload.to_dict(), "cluster": cluster.to_dict(), "product": product}
    names = ["alone", "waits", "overlaps"]
    if with_ddp:
        names.insert(0, fastest_ddp(pool, given, clip))
    pool.run(set_up, name="alone", kind="alone", **given)
    for name in ("waits", "overlaps"):
        overlap = name == "overlaps"
        if not trials:
            pool.run(set_up, name=name, kind="engine", plan=plan.to_dict(), overlap=overlap, **given)
            continue
        pool.run(set_up, name=name, kind="job", overlap=overlap, **given)
        pool.run(measure, name=name, steps=trials)
        print(f"{name}: {pool.run(told, name=name)[0]}", flush=True)
    found = take_turns(pool, names, rounds, STEPS, clip)
    for name in names:
        pool.run(close, name=name)
    return found


def fastest_ddp(pool: WorkerPool, given: dict[str, Any], clip: bool) -> str:
    """The name of the fastest DDP, which stays set up."""
    caps = [f"ddp {cap}" for cap in CAPS]
    for name, cap in zip(caps, CAPS, strict=True):
        pool.run(set_up, name=name, kind="ddp", cap=cap, **given)
    found = take_turns(pool, caps, rounds=2, steps=2, clip=clip)
    swept = {name: statistics.median(times) for name, times in found.items()}
    best = min(caps, key=lambda name: swept[name])
    for name in set(caps) - {best}:
        pool.run(close, name=name)
    return best


def take_turns(pool: WorkerPool, names: Sequence[str], rounds: int, steps: int, clip: bool) -> dict[str, list[float]]:
    """Seconds of a step in each round by contender, after one turn that does not count."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        pool.run(measure, name=name, steps=1, clip=clip)
    for number in range(rounds):
        for name in names if number % 2 == 0 else names[::-1]:
            found[name].append(slowest(pool.run(measure, name=name, steps=steps, clip=clip)))
    return found


HEADINGS = (
    "cluster", "model", "DDP (cap)", "waits", "overlap", "over DDP", "over waits", "predicted", "alone", "bound, waits",
    "bound",
)  # fmt: skip


def row(
    workload: Workload, cluster: ClusterSpec, plan: SyncPlan, hosts: Constants, found: dict[str, list[float]]
) -> list[str]:
    """Cells of the table after the model's name."""
    seconds = {name: statistics.median(times) for name, times in found.items()}
    timed = with_compute(workload, seconds["alone"])  # as a job measures it, with the optimizer's step
    schedule = compile_plan(plan, timed, cluster)
    predicted = overlapped_step_time(schedule, timed, Replay(timed, cluster, hosts))
    bounds = least_step(workload, cluster, FRAMING).seconds, least_overlapped_step(workload, cluster, FRAMING)
    bounds = bounds[0], max(bounds[1], seconds["alone"])  # with the optimizer's step and the work of PyTorch
    ddp = next((name for name in found if name.startswith("ddp")), None)
    return [
        "" if ddp is None else f"{1e3 * seconds[ddp]:.0f} ({ddp.split()[1]})",
        *(f"{1e3 * seconds[name]:.0f}" for name in ("waits", "overlaps")),
        "" if ddp is None else speedup(found[ddp], found["overlaps"]),
        speedup(found["waits"], found["overlaps"]),
        *(f"{1e3 * each:.0f}" for each in (predicted, seconds["alone"], *bounds)),
    ]


def speedup(others: Sequence[float], ours: Sequence[float]) -> str:
    """The median of the rounds' ratios, with the smallest and the largest."""
    ratios = sorted(other / own for other, own in zip(others, ours, strict=True))
    return f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]"


def main(arguments: Sequence[str]) -> None:
    """Measure, and print a table; a wrong name of a key, a model or a cluster is one message, before ranks start."""
    defaults = {"rounds": "4", "rate": "1000", "clusters": "four_equal", "ddp": "true", "seconds": "0.351"}
    given, models = read_arguments(
        "step_overlap", arguments, {**defaults, "clip": "false", "trials": "0", "real": "false"}
    )
    try:
        workloads = {model: catalogue.build(model) for model in models or MODELS}
        clusters = {name: resolve_cluster(name).without_addresses() for name in given["clusters"].split(",")}
    except AutoSyncError as error:
        sys.exit(f"step_overlap: {error}")
    table = Table(*HEADINGS, title=f"milliseconds of a step, fastest link {given['rate']} Mbit/s")
    here = [Path(__file__).parents[2]]
    for name, described in clusters.items():
        cluster = slowed(described, float(given["rate"]) * 1e6 / 8)
        with EmulatedLaunch(cluster) as launch, WorkerPool(cluster.world_size, launch, extra_paths=here) as pool:
            hosts, _ = measured_hosts(pool, "emulated", paced=False)
            known_by_job = hosts.model_copy(update={"burst": Constants().burst})
            # A layer begins when the hooks of the one before it have ended. If it sleeps, it occupies no core.
            if given["real"] != "true":
                hosts = hosts.model_copy(update={"computing": 0.0})
            for model, whole in workloads.items():
                workload = dense(whole, cluster, float(given["seconds"]))
                plan, reason = choose_without_trials(workload, cluster, known_by_job, TuningSettings(), overlaps=True)
                print(f"{name}, {model}: {reason}", flush=True)
                rounds, trials = int(given["rounds"]), int(given["trials"])
                with_ddp, clip = given["ddp"] == "true", given["clip"] == "true" and not trials
                real = given["real"] == "true"
                found = compare(pool, workload, cluster, plan, rounds, with_ddp, clip, trials, real)
                print(json.dumps(found), flush=True)
                table.add_row(name, model, *row(workload, cluster, plan, hosts, found))
    Console(width=160).print(table)


def slowed(cluster: ClusterSpec, rate: float) -> ClusterSpec:
    """The cluster, scaled so that its fastest link has ``rate`` bytes/s."""
    return cluster.scaled(rate / max(max(link.bandwidth, link.reverse_bandwidth) for link in cluster.links))


def dense(workload: Workload, cluster: ClusterSpec, seconds: float) -> Workload:
    """The workload with dense gradients that need so many seconds on the links, and a computation as long."""
    workload = with_kind(workload, {variable.name for variable in workload.variables}, "dense")
    workload = scaled(workload, seconds / synchronization_bound(workload, cluster, FRAMING))
    return with_compute(workload, synchronization_bound(workload, cluster, FRAMING))


if __name__ == "__main__":
    # Workers import the functions by name, from a module that is not the main one.
    from tests.benchmarks import step_overlap

    step_overlap.main(sys.argv[1:])
