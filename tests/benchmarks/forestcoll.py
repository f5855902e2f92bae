"""Packed trees, the project's bound, and the optimum for equal shards: ``python -m tests.benchmarks.forestcoll``.

ForestColl (arXiv 2402.06787) reaches the optimum for all-gather and reduce-scatter with equal shards: ``M`` bytes on
``N`` ranks take ``M / N`` times the largest ratio, over all cuts, of ranks inside to bandwidth out of the cut. Its
all-reduce is a reduce-scatter and then an all-gather. The ratio is computed here by maximum flows, independently of the
packing. The project's bound lets a byte be summed at any rank, so shares may be unequal.

Rates are bytes synchronized per second. Needs neither root nor an idle machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import numpy
from rich.console import Console
from rich.table import Table

from lightning_autosync.cluster import (
    ClusterSpec,
    LinkGraph,
    pack_trees,
    resolve_cluster,
    shipped_clusters,
    synchronization_rate,
)
from tests.clusters import asymmetric_cluster
from tests.max_flows import shard_rate

SEEDS = 25
SHAPES = {"ring": "ring", "mesh": "mesh", "star": "star", "racks": "two-level tree"}


def equal_shard_rate(spec: ClusterSpec) -> float:
    """Bytes/s of the best reduce-scatter followed by the best all-gather, both with equal shards."""
    link_graph = LinkGraph(spec)
    links = [(one.source, one.target, one.bandwidth) for one in link_graph.channels]
    gather = shard_rate(links, link_graph.ends)
    scatter = shard_rate([(target, source, rate) for source, target, rate in links], link_graph.ends)
    return spec.world_size / (1 / gather + 1 / scatter)


def random_cluster(shape: str, seed: int, symmetric: bool) -> ClusterSpec:
    """3 to 8 nodes of one device; rates of 10 to 100 MB/s."""
    random = Random(seed)
    spec = asymmetric_cluster(shape, random.randint(3, 8), random)
    if not symmetric:
        return spec
    links = [{**link.model_dump(), "reverse_bandwidth": link.bandwidth} for link in spec.links]
    return ClusterSpec.from_dict({**spec.to_dict(), "links": links})


def two_spines() -> ClusterSpec:
    """Two leaf switches of four nodes (1 MB/s each), with two uplinks of half that rate to different spines."""
    leaves, spines = ("leaf0", "leaf1"), ("spine0", "spine1")
    links = [{"a": f"n{node}", "b": leaves[node // 4], "bandwidth": 1e6} for node in range(8)]
    links += [{"a": leaf, "b": spine, "bandwidth": 5e5} for leaf in leaves for spine in spines]
    nodes = [{"name": f"n{node}"} for node in range(8)]
    described = {"name": "spines", "nodes": nodes, "switches": [*leaves, *spines], "links": links}
    return ClusterSpec.from_dict({"format": ClusterSpec.FORMAT, **described})


def groups() -> Iterator[tuple[str, list[ClusterSpec]]]:
    for name in shipped_clusters():
        yield name, [resolve_cluster(name)]
    yield "two leaves, two spines", [two_spines()]
    for symmetric, word in ((True, "symmetric"), (False, "asymmetric")):
        for shape, title in SHAPES.items():
            yield f"{word} {title}", [random_cluster(shape, seed, symmetric) for seed in range(SEEDS)]


def _median_and_range(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{numpy.median(values):.3f} [{min(values):.3f}, {max(values):.3f}]"


def main() -> None:
    compared: dict[str, Callable[[ClusterSpec], float]] = {
        "packed trees / bound": lambda spec: pack_trees(spec).rate / synchronization_rate(spec),
        "bound / equal shards": lambda spec: synchronization_rate(spec) / equal_shard_rate(spec),
        "packed trees / equal shards": lambda spec: pack_trees(spec).rate / equal_shard_rate(spec),
    }
    table = Table("links", "clusters", "ranks", *compared, title="rates of synchronization: median \\[range]")
    for title, specs in groups():
        if not all(spec.measured and spec.world_size > 1 for spec in specs):
            continue
        sizes = sorted({spec.world_size for spec in specs})
        ranks = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        cells = [_median_and_range([ratio(spec) for spec in specs]) for ratio in compared.values()]
        table.add_row(title, str(len(specs)), ranks, *cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
