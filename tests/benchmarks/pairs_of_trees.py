"""Pairs of trees beside single trees and DDP on asymmetric links: ``python -m tests.benchmarks.pairs_of_trees``.

Needs root. Four nodes in a full mesh or a ring; each direction of a link has a random rate of 100 to 400 Mbit/s. A step
synchronizes 8 MB and computes nothing. For each cluster the contenders take turns: the trees of `pack_trees`, the best
trees that carry data both ways (from the same program, restricted), and four settings of DDP. Speedups are medians of
the rounds' ratios with their intervals; the replay's is that of its two predicted steps.
"""

from __future__ import annotations

import os
from itertools import combinations
from random import Random

from rich.console import Console
from rich.table import Table

from lightning_autosync.cluster import ClusterSpec, LinkGraph, pack_trees, synchronization_rate
from lightning_autosync.cluster.packing import _few_trees, mirrored_packing
from lightning_autosync.measure.bench.result import BenchResult
from lightning_autosync.measure.bench.run import run_bench
from lightning_autosync.measure.bench.settings import BenchSettings
from lightning_autosync.measure.hosts import job_hosts
from lightning_autosync.plan import SyncPlan, WeightedTree, builders, compile_plan
from lightning_autosync.replay import Replay
from lightning_autosync.workload import Workload

NODES = 4
CASES = [("mesh", 0), ("mesh", 1), ("mesh", 2), ("ring", 0), ("ring", 1)]
MBIT = 1e6 / 8
SETTINGS = {
    "model": {"kind": "flat", "mib": 8e6 / 2**20},
    "launch": {"kind": "emulated"},
    "ddp": {"gradient_as_bucket_view": [False, True], "static_graph": [False, True]},
    "contenders": {
        "pairs": {"builder": "packed_trees"},
        "single": {"builder": "tests.benchmarks.pairs_of_trees:single_trees"},
    },
    "warm_up": 2,
    "rounds": 9,
    "steps": 3,
}


def asymmetric(shape: str, seed: int) -> ClusterSpec:
    random = Random(seed)
    names = [f"node{index}" for index in range(NODES)]
    ring = list(zip(names, [*names[1:], names[0]], strict=True))
    links = [
        {"a": a, "b": b, "bandwidth": _rate(random), "reverse_bandwidth": _rate(random)}
        for a, b in (ring if shape == "ring" else combinations(names, 2))
    ]
    fields = {"name": f"{shape}_{seed}", "nodes": [{"name": name} for name in names], "links": links}
    return ClusterSpec.from_dict({"format": ClusterSpec.FORMAT, **fields})


def _rate(random: Random) -> float:
    return random.uniform(100, 400) * MBIT


def single_trees(workload: Workload, cluster: ClusterSpec) -> SyncPlan:
    """The plan of `packed_trees`, with the best trees that carry data up and back down the same edges."""
    link_graph = LinkGraph(cluster)
    packing = _few_trees(mirrored_packing(link_graph), link_graph)
    trees = tuple(WeightedTree.model_validate(vars(tree)) for tree in packing.trees)
    plan = builders.packed_trees(workload, cluster)
    return plan.model_copy(update={"groups": tuple(group.model_copy(update={"trees": trees}) for group in plan.groups)})


def predicted(result: BenchResult, name: str) -> float:
    """Seconds of a step in the replay, with the constants of emulated links."""
    plan = SyncPlan.from_dict(result.preparation.orders[name]["plan"])
    schedule = compile_plan(plan, result.workload, result.cluster)
    return Replay(result.workload, result.cluster, job_hosts("emulated", True)).predict(schedule).step_time


def _speedup(result: BenchResult, reference: str) -> str:
    found = result.speedup("pairs", reference)
    return f"{found.median:.2f}x [{found.low:.2f}, {found.high:.2f}]"


def main() -> None:
    times_of = ("pairs, ms", "single, ms", "best DDP, ms", "pairs / bound")
    ratios = ("pairs over single", "in the replay", "of rates", "pairs over best DDP")
    table = Table("links", *times_of, *ratios, "foreign cores")
    for shape, seed in CASES:
        spec = asymmetric(shape, seed)
        result = run_bench(BenchSettings.parse({**SETTINGS, "cluster": spec.to_dict()}))
        times = [result.measurements[name].median * 1000 for name in ("pairs", "single", result.best_ddp)]
        replayed = predicted(result, "single") / predicted(result, "pairs")
        link_graph = LinkGraph(spec)
        rates = pack_trees(spec).rate / _few_trees(mirrored_packing(link_graph), link_graph).rate
        table.add_row(
            f"{shape} {seed}",
            *(f"{time:.0f}" for time in times),
            f"{result.bound_share('pairs') or 0:.2f}",
            _speedup(result, "single"),
            f"{replayed:.2f}",
            f"{rates:.2f} ({synchronization_rate(spec) / MBIT:.0f} Mbit/s)",
            _speedup(result, result.best_ddp),
            f"{result.foreign_cores:.2f}",
        )
    Console(width=180).print(table)
    print(f"load average {', '.join(f'{load:.2f}' for load in os.getloadavg())} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
