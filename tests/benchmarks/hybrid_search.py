"""How far coordinate descent ends from the exact optimum on chains, and how long searches take.

``python -m tests.benchmarks.hybrid_search`` needs neither a cluster nor root.
"""

from __future__ import annotations

import random
import statistics
import time
from itertools import pairwise

import torch
from torch import nn

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.hybrid.capture import capture
from lightning_autosync.hybrid.cost import LayerCosts, StepSettings
from lightning_autosync.hybrid.descent import Descent
from lightning_autosync.hybrid.exact import exact
from lightning_autosync.hybrid.mesh import Links, near_order, shapes
from lightning_autosync.hybrid.pricing import Pricing
from lightning_autosync.hybrid.rates import HybridRates
from lightning_autosync.hybrid.search import search
from lightning_autosync.hybrid.structure import structure
from lightning_autosync.hybrid.tables import tables

CHAINS, RANKS, STARTS = 40, 8, 4
WIDTHS = (256, 512, 1024, 2048, 4096)
RATE = "1 Gbit/s"
ADDING_UP = StepSettings(overlap=False)
"""The exact optimum is that of costs that add up."""


def main() -> None:
    ratios = [_ratio(random.Random(seed)) for seed in range(CHAINS)]
    optimal = sum(ratio < 1 + 1e-9 for ratio in ratios)
    print(
        f"{CHAINS} chains of 4 to 12 linear layers on {RANKS} ranks, {STARTS} random starts a mesh: step time over the "
        f"optimum's, median {statistics.median(ratios):.4f}, largest {max(ratios):.4f}, optimal in {optimal}"
    )
    print("layers  ranks  seconds of a search over all meshes")
    for layers in (24, 96):
        graph = capture(_blocks(layers), torch.zeros(8, 512))
        for ranks in (16, 64, 256, 1024):
            cluster = ClusterSpec.uniform(ranks // 8, 8, RATE)
            start = time.perf_counter()
            search(graph, cluster)
            print(f"{layers:6}  {ranks:5}  {time.perf_counter() - start:.1f}", flush=True)


def _ratio(rng: random.Random) -> float:
    """The step time that descents find, as a multiple of the least; both the best of all meshes."""
    widths = [rng.choice(WIDTHS) for _ in range(rng.randint(5, 13))]
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(one, other) for one, other in pairwise(widths)))
    graph = structure(capture(model, torch.zeros(rng.choice((4, 32, 256)), widths[0])))
    cluster = ClusterSpec.uniform(RANKS, 1, RATE)
    least, found = [], []
    for mesh in shapes(RANKS):
        pricing = Pricing(mesh, near_order(cluster), Links(cluster), HybridRates())
        on_mesh = tables(graph, LayerCosts(pricing, ADDING_UP))
        descent = Descent(on_mesh, overlap=False)
        starts = [[rng.randrange(len(table)) for table in on_mesh.alone] for _ in range(STARTS)]
        least.append(exact(on_mesh)[1])
        found += [descent.run(start)[1] for start in starts]
    return min(found) / min(least)


def _blocks(layers: int) -> nn.Sequential:
    """24 different layers; 96 are these four times."""
    widths = [512, *(512 + 64 * (number % 24) for number in range(1, layers)), 512]
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(one, other) for one, other in pairwise(widths)))


if __name__ == "__main__":
    main()
