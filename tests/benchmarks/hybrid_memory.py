"""How near the predicted memory of split models is to what torch's allocator counts.

``python -m tests.benchmarks.hybrid_memory`` trains each plan on 4 ranks over loopback. What counts are
the most bytes of tensors in a few steps, but for the batches, which are all made at first.
"""

from __future__ import annotations

import statistics

import torch

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.hybrid.capture import capture
from lightning_autosync.hybrid.cost import Settings
from lightning_autosync.hybrid.plan import HybridPlan
from lightning_autosync.hybrid.prediction import predict
from lightning_autosync.hybrid.rates import HybridRates
from lightning_autosync.hybrid.search import search
from lightning_autosync.measure.launches.settings import LaunchSettings
from lightning_autosync.measure.models.recipes import Model, model_of
from lightning_autosync.measure.session import Contender, MeasurementSession
from tests.benchmarks import memory_calls

CLUSTER = ClusterSpec.uniform(4, 1, "1 Gbit/s")
MODELS = {
    "perceptron": {"kind": "perceptron", "widths": [4096, 8192, 4096, 1024], "batch": 64},
    "vgg": {"kind": "vgg", "size": 64, "channels": [32, 64, 128], "hidden": 2048, "batch": 32},
    "transformer": {"kind": "transformer", "width": 512, "layers": 8, "length": 256, "batch": 4},
}
STEPS = 3
SGD = Settings(slots=0)


def main() -> None:
    errors = []
    for name, data in MODELS.items():
        model = model_of(data)
        with torch.device("meta"):
            module = model.module()
        graph = capture(module, *model.batches(0)[0])
        found = search(graph, CLUSTER, HybridRates(), settings=SGD, keep=3)
        plans = {"data parallel": found.data_parallel.plan, "search": found.best.plan}
        if found.megatron is not None:
            plans["megatron"] = found.megatron.plan
        plans["least memory"] = search(graph, CLUSTER, HybridRates(), settings=SGD, memory=1.0).best.plan
        for title, plan in plans.items():
            predicted, measured = predict(plan, graph, CLUSTER, settings=SGD).memory, _measured(model, plan)
            errors.append(abs(predicted / measured - 1))
            print(
                f"{name:12} {title:14} {'x'.join(map(str, plan.mesh)):6} predicted {predicted / 1e6:7.1f} MB, "
                f"measured {measured / 1e6:7.1f} MB, {predicted / measured - 1:+.1%}",
                flush=True,
            )
    print(f"{len(errors)} plans: median error {statistics.median(errors):.1%}, largest {max(errors):.1%}")


def _measured(model: Model, plan: HybridPlan) -> float:
    """Bytes of the rank that needs most."""
    rest = {"sparse": False, "cluster": CLUSTER.to_dict(), "timeout": 60.0}
    with MeasurementSession(CLUSTER, LaunchSettings(), 120.0) as session:
        contender = Contender("plan", {**rest, "model": model.model_dump(), "hybrid": plan.to_dict()})
        session.run(memory_calls.begin)
        session.measure(contender, 1)  # the whole model is there for a moment when it is made
        session.run(memory_calls.mark)
        session.measure(contender, STEPS)
        peaks = session.run(memory_calls.peak)
    batches = sum(tensor.nbytes for batch in model.batches(0) for tensor in batch)
    return float(max(peaks) - batches)


if __name__ == "__main__":
    main()
