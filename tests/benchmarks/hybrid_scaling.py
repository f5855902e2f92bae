"""Bytes that a rank sends as ranks are added, model and global batch fixed: predicted, logged, and their least.

``python -m tests.benchmarks.hybrid_scaling`` needs neither a cluster nor root. A chain of square linear layers is split
on all meshes by the exact search, with rates by which bytes cost time, and computing so much that no rank repeats
another's work. The best plan runs as one rank of a job
whose others are not there, and its collectives are logged.
"""

from __future__ import annotations

import math

import numpy
import torch
from torch import nn

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.hybrid.capture import capture
from lightning_autosync.hybrid.conversions import COLLECTIVES, sent
from lightning_autosync.hybrid.cost import LayerCosts, StepSettings
from lightning_autosync.hybrid.exact import exact
from lightning_autosync.hybrid.execution.activation import bring_home
from lightning_autosync.hybrid.execution.live_mesh import LiveMesh
from lightning_autosync.hybrid.execution.split_model import SplitModel
from lightning_autosync.hybrid.mesh import Links, near_order, shapes
from lightning_autosync.hybrid.plan import HybridPlan
from lightning_autosync.hybrid.prediction import predict
from lightning_autosync.hybrid.pricing import Pricing
from lightning_autosync.hybrid.rates import CollectiveRate, HybridRates
from lightning_autosync.hybrid.structure import structure
from lightning_autosync.hybrid.tables import plan_of, tables
from tests.collective_traffic import TrafficLog, pretended_job, words_at_least

WIDTH, LAYERS = 512, 8
RANKS = (2, 4, 8, 16, 32, 64)
_FREE = CollectiveRate(call=0.0, peer=0.0, host=0.0)
RATES = HybridRates(flops=1e9, memory=1e30, operation=0.0, layer=0.0, update=1e30, **dict.fromkeys(COLLECTIVES, _FREE))


def chain() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def best(ranks: int) -> tuple[HybridPlan, float]:
    """The plan that sends least, and its predicted bytes."""
    cluster = ClusterSpec.uniform(ranks, 1, "1 Gbit/s")
    graph = capture(chain(), torch.zeros(WIDTH // ranks, WIDTH))
    settings, found = StepSettings(overlap=False), []
    for mesh in shapes(ranks):
        pricing = Pricing(mesh, near_order(cluster), Links(cluster), RATES)
        on_mesh = tables(structure(graph), LayerCosts(pricing, settings))
        plan = plan_of(on_mesh, exact(on_mesh)[0])
        found.append((predict(plan, graph, cluster, RATES, settings).bytes, plan))
    size, plan = min(found, key=lambda one: one[0])
    return plan, size


def logged(plan: HybridPlan, ranks: int) -> float:
    """Bytes that one rank sends in a forward and a backward pass, and to sum the gradients of replicas."""
    model, batch = chain(), torch.zeros(WIDTH // ranks, WIDTH)
    with pretended_job(ranks):
        mesh = LiveMesh(plan)
        split = SplitModel(model, plan, mesh)
        split.split()
        with TrafficLog() as log, split.forward(batch):
            bring_home(model(batch)).sum().backward()
    size = sum(one.sent for one in log.collectives if one.payload > 16)  # less is the comparison of batches
    for part in split.parts.values():
        replicas = math.prod(mesh.sizes[k] for k in part.replicas)
        size += 4 * math.prod(part.shard.local_shape) * sent("all_reduce", replicas)
    return size


def main() -> None:
    print("ranks  mesh         predicted kB  logged kB  data parallel kB  least kB of the products, each by itself")
    sizes = []
    for ranks in RANKS:
        plan, size = best(ranks)
        data_parallel = 4 * LAYERS * WIDTH**2 * sent("all_reduce", ranks)
        least = 4 * 3 * LAYERS * words_at_least(WIDTH, WIDTH, WIDTH, ranks)
        sizes.append(size)
        row = (size, logged(plan, ranks), data_parallel, least)
        print(f"{ranks:5}  {' x '.join(map(str, plan.mesh)):11}", *(f"{value / 1000:12.1f}" for value in row))
    exponent = numpy.polyfit(numpy.log(RANKS[1:]), numpy.log(sizes[1:]), 1)[0]
    print(f"bytes grow as ranks to the power {exponent:.2f} from {RANKS[1]} ranks on")


if __name__ == "__main__":
    main()
