"""Pairs of trees on emulated meshes with asymmetric links; needs root and an idle machine, takes 7 minutes.

    python -m tests.benchmarks.asymmetric_meshes [MIB [MESH ...]]

A mesh has a link between each two of 3 to 5 nodes. In a *random* mesh, each direction of each link has a random rate,
up to 1 : 10. In a *directed* mesh, all links are fast one way and slow the other way, by a stated ratio, and every node
sends and receives over fast links. The fastest link has 400 Mbit/s. A step synchronizes one vector of MIB MiB (16),
without computation. These take turns in the same live processes:

- ``pairs``: packed trees, where a broadcast tree may differ from its reduce tree. This is `packed_trees`.
- ``both ways``: packed trees that carry sums up and means down.
- DDP. One vector is one bucket, so that the size of buckets makes no difference.

Without names, the table has all meshes. Names are ``random_NODES_SEED`` and ``directed_NODES_RATIO``. A speedup is the
other's time divided by that of ``pairs``: the median of the rounds' ratios with its interval. The computed one is that
of the rates that trees reach if only links count. Shares of the bound are medians; the predicted one is the replay's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import combinations
from random import Random

from rich.console import Console
from rich.table import Table

from lightning_autosync.cluster import ClusterSpec, pack_trees
from lightning_autosync.measure.bench.result import BenchResult
from lightning_autosync.measure.bench.run import run_bench
from lightning_autosync.measure.bench.settings import BenchSettings
from lightning_autosync.measure.hosts import emulated_hosts
from lightning_autosync.plan import SyncPlan, builders, compile_plan
from lightning_autosync.plan.spec import WeightedTree
from lightning_autosync.replay import Replay
from lightning_autosync.workload import Workload
from tests.benchmarks.bound_shares import MBIT, document
from tests.clusters import asymmetric_cluster

FASTEST = 400 * MBIT
MESHES = (
    *(f"random_{nodes}_{seed}" for nodes in (3, 4, 5) for seed in range(2)),
    *("directed_3_2", "directed_4_2", "directed_5_2", "directed_4_4"),
)
CONTENDERS = {
    "pairs": {"builder": "packed_trees"},
    "both ways": {"builder": "tests.benchmarks.asymmetric_meshes:trees_both_ways"},
}
DDP = {"gradient_as_bucket_view": [True], "static_graph": [True]}
HEADINGS = ("mesh", "bound ms", "DDP ms", "both ways ms", "pairs ms", "both ways of bound", "pairs of bound")
SPEEDUPS = ("predicted", "over both ways", "computed", "over DDP", "busy cores")


def trees_both_ways(workload: Workload, cluster: ClusterSpec) -> SyncPlan:
    """Packed trees that carry sums up and means down."""
    trees = tuple(WeightedTree.model_validate(vars(tree)) for tree in pack_trees(cluster, pairs=False).trees)
    plan = builders.packed_trees(workload, cluster)
    groups = tuple(group.model_copy(update={"trees": trees}) for group in plan.groups)
    return plan.model_copy(update={"groups": groups})


def directed_mesh(nodes: int, ratio: float) -> ClusterSpec:
    """A mesh of links that are ``ratio`` times as fast one way; the fast way alternates with the distance of nodes."""
    names = [f"n{index}" for index in range(nodes)]
    links = []
    for a, b in combinations(range(nodes), 2):
        rates = (FASTEST, FASTEST / ratio) if (b - a) % 2 else (FASTEST / ratio, FASTEST)
        links.append({"a": names[a], "b": names[b], "bandwidth": rates[0], "reverse_bandwidth": rates[1]})
    return document("directed_mesh", names, [], links)


def mesh(name: str) -> ClusterSpec:
    kind, nodes, number = name.split("_")
    if kind == "directed":
        return directed_mesh(int(nodes), float(number))
    spec = asymmetric_cluster("mesh", int(nodes), Random(int(number)))
    rates = [rate for link in spec.links for rate in (link.bandwidth, link.reverse_bandwidth) if rate is not None]
    return spec.scaled(FASTEST / max(rates))


def bench(cluster: ClusterSpec, mib: float) -> BenchResult:
    return run_bench(
        BenchSettings.parse(
            {
                "cluster": cluster.to_dict(),
                "launch": {"kind": "emulated"},
                "model": {"kind": "flat", "mib": mib},
                "ddp": DDP,
                "contenders": CONTENDERS,
                "warm_up": 2,
                "rounds": 5,
                "steps": 1,
            }
        )
    )


def cells(result: BenchResult) -> Iterator[str]:
    """What the table has of a mesh, without its name."""
    cluster, workload, measured = result.cluster, result.workload, result.measurements
    assert result.bound is not None
    bound = result.bound.seconds
    yield f"{1e3 * bound:.0f}"
    for name in (result.best_ddp, "both ways", "pairs"):
        yield f"{1e3 * measured[name].median:.0f}"
    for name in ("both ways", "pairs"):
        yield f"{result.bound_share(name):.1%}"
    schedule = compile_plan(builders.packed_trees(workload, cluster), workload, cluster)
    yield f"{bound / Replay(workload, cluster, emulated_hosts()).predict(schedule).step_time:.1%}"
    for other in ("both ways", result.best_ddp):
        speedup = result.speedup("pairs", other)
        yield f"{speedup.median:.2f}x [{speedup.low:.2f}, {speedup.high:.2f}]"
        if other == "both ways":
            yield f"{pack_trees(cluster).rate / pack_trees(cluster, pairs=False).rate:.2f}x"
    yield f"{result.foreign_cores or 0.0:.2f}"


def main(mib: str = "16", *names: str) -> None:
    table = Table(*HEADINGS, *SPEEDUPS, title=f"{mib} MiB")
    for name in names or MESHES:
        row = [name, *cells(bench(mesh(name), float(mib)))]
        print(" | ".join(row), flush=True)
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    Console(width=190).print(table)


if __name__ == "__main__":
    main(*sys.argv[1:])
