"""How near the predicted memory of split models is to what torch's allocator counts.

``python -m tests.benchmarks.hybrid_memory`` needs neither a cluster nor root. Each plan trains as one rank of a job
whose others are not there: tensors, buffers and the engine are real, collectives leave data as it is. The allocator is
followed in one process, because its records leave out what threads of gloo free. The batches, which are all made at
first, do not count.
"""

from __future__ import annotations

import gc
import statistics

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.hybrid.capture import capture
from lightning_autosync.hybrid.cost import StepSettings
from lightning_autosync.hybrid.graph import Graph
from lightning_autosync.hybrid.plan import HybridPlan
from lightning_autosync.hybrid.prediction import predict
from lightning_autosync.hybrid.search import search
from lightning_autosync.measure.models.model import Model
from lightning_autosync.measure.models.recipes import model_of
from lightning_autosync.measure.replicas import HybridReplica, Training
from tests.collective_traffic import pretended_job

CLUSTER = ClusterSpec.uniform(4, 1, "1 Gbit/s")
MODELS = {
    "perceptron": {"kind": "perceptron", "widths": [4096, 8192, 4096, 1024], "batch": 64},
    "vgg": {"kind": "vgg", "size": 64, "channels": [32, 64, 128], "hidden": 2048, "batch": 32},
    "transformer": {"kind": "transformer", "width": 512, "layers": 8, "length": 256, "batch": 4},
}
STEPS = 3
SGD = StepSettings(slots=0)


def main() -> None:
    torch.set_num_threads(1)
    errors = []
    for name, data in MODELS.items():
        model = model_of(data)
        with torch.device("meta"):
            module = model.module()
        graph = capture(module, *model.batches(0)[0])
        for title, plan in _plans(graph).items():
            predicted, measured = predict(plan, graph, CLUSTER, settings=SGD).memory, _measured(model, plan)
            errors.append(abs(predicted / measured - 1))
            print(
                f"{name:12} {title:14} {'x'.join(map(str, plan.mesh)):6} predicted {predicted / 1e6:7.1f} MB, "
                f"measured {measured / 1e6:7.1f} MB, {predicted / measured - 1:+.1%}",
                flush=True,
            )
    print(f"{len(errors)} plans: median error {statistics.median(errors):.1%}, largest {max(errors):.1%}")


def _plans(graph: Graph) -> dict[str, HybridPlan]:
    found = search(graph, CLUSTER, settings=SGD, keep=3)
    plans = {"data parallel": found.data_parallel.plan, "search": found.best.plan}
    if found.megatron is not None:
        plans["megatron"] = found.megatron.plan
    plans["least memory"] = search(graph, CLUSTER, settings=SGD, memory=1.0).best.plan
    return plans


def _measured(model: Model, plan: HybridPlan) -> float:
    """The most bytes of tensors in a few steps on one rank."""
    gc.collect()
    with pretended_job(plan.world_size), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        replica = HybridReplica(Training.of(model, False, CLUSTER), plan, CLUSTER, 60.0)
        for _ in range(STEPS):
            with record_function("step"):
                replica.step()
        replica.close()
    events: list[tuple[int, str, int]] = [
        (event.start_ns(), event.name(), event.nbytes())
        for event in profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    ]
    held = most = 0
    for _, name, size in sorted(events):
        if name == "[memory]":
            held += size
            most = max(most, held)
        elif name == "step":
            most = held  # the whole model was there for a moment when it was made
    return float(most - sum(tensor.nbytes for batch in model.batches(0) for tensor in batch))


if __name__ == "__main__":
    main()
