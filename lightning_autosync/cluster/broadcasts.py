"""Packing broadcasts into a cluster: the trees along which every rank sends data of its own to all other ranks.

A bundle has one tree from each rank. The linear program gives each bundle a share of the data, the same of every rank.
Under channel prices, the cheapest bundle consists of the minimum spanning arborescence from each rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy
from scipy.sparse import csc_array

from lightning_autosync.cluster.columns import Packing, Vector, cheapest_weights, generate_columns
from lightning_autosync.cluster.link_graph import LinkGraph
from lightning_autosync.cluster.packing import filling_rate
from lightning_autosync.cluster.spec import ClusterSpec
from lightning_autosync.cluster.trees import Parents, chains, height, hierarchical_trees, least_arborescence, root_at

Bundle = tuple[Parents, ...]
"""[ranks] the broadcast tree from each rank."""

MOST_RANKS = 16
"""Largest number of ranks for which bundles are generated; with more, the program has only the bundles it begins with:
each rank sends to every other rank, or along trees that follow nodes and racks."""
_RATE_KEPT = 0.97
"""Share of the best rate for which flat trees, then few bundles are preferred: rows are few, so that each further hop
and each further frame counts."""
_LEAST_WEIGHT = 0.02
_WORTH_OF_RATE = 0.5  # in levels of height


@dataclass(frozen=True)
class BroadcastPacking:
    """Bundles and their shares of each rank's data.

    Attributes:
        rate: bytes/s that each rank broadcasts; infinite for one rank.
        weights: [bundles] shares, which sum to 1, largest first.
        bundles: the bundles.
    """

    rate: float
    weights: tuple[float, ...]
    bundles: tuple[Bundle, ...]


@lru_cache(maxsize=64)
def pack_broadcasts(spec: ClusterSpec) -> BroadcastPacking:
    """A few flat bundles by which all ranks broadcast at a rate near the best one.

    Raises:
        ClusterError: the rates of the cluster are unknown.
    """
    link_graph = LinkGraph(spec)
    direct = direct_bundle(spec.world_size)
    if spec.world_size == 1:
        return BroadcastPacking(math.inf, (1.0,), (direct,))
    packing = _best(link_graph)
    capacities = link_graph.capacities
    if (rate := filling_rate(_load([direct], link_graph) @ numpy.ones(1), capacities)) >= _RATE_KEPT * packing.rate:
        return BroadcastPacking(rate, (1.0,), (direct,))
    weights = _flat_weights(packing, capacities, spec.world_size)
    order = [int(index) for index in numpy.argsort(-weights, kind="stable") if weights[index] > 0]
    return BroadcastPacking(
        filling_rate(packing.loads @ weights, capacities),
        tuple(float(weights[index]) for index in order),
        tuple(packing.columns[index] for index in order),
    )


def direct_bundle(ranks: int) -> Bundle:
    """Each rank sends to every other rank."""
    return tuple(tuple(-1 if rank == root else root for rank in range(ranks)) for root in range(ranks))


def _best(link_graph: LinkGraph) -> Packing[Bundle]:
    count = link_graph.world_size
    arcs = [(i, j) for i in range(count) for j in range(count) if i != j]
    arc_loads = link_graph.load_rows([arc] for arc in arcs)

    def price(duals: Vector) -> Iterator[Bundle]:
        if count > MOST_RANKS:
            return
        cost = numpy.zeros((count, count))
        for arc, value in zip(arcs, arc_loads @ duals, strict=True):
            cost[arc] = value
        yield tuple(least_arborescence(cost, root) for root in range(count))

    return generate_columns(
        link_graph.capacities, _seeds(link_graph.spec), lambda bundles: _load(bundles, link_graph), price
    )


def _seeds(spec: ClusterSpec) -> Iterator[Bundle]:
    ranks = spec.world_size
    yield direct_bundle(ranks)
    for tree in (*hierarchical_trees(spec.hierarchy(), ranks), *chains(ranks)):
        yield tuple(root_at(tree, root, ranks) for root in range(ranks))


def _load(bundles: Sequence[Bundle], link_graph: LinkGraph) -> csc_array:
    """[channels, bundles] number of times that the trees of each bundle cross each channel."""
    return link_graph.load_rows([list(_arcs(bundle)) for bundle in bundles]).T.tocsc()


def _arcs(bundle: Iterable[Parents]) -> Iterator[tuple[int, int]]:
    for tree in bundle:
        yield from ((parent, rank) for rank, parent in enumerate(tree) if parent >= 0)


def _flat_weights(packing: Packing[Bundle], capacities: Vector, ranks: int) -> Vector:
    """[bundles] weights that sum to 1, of flat trees that spread the forwarding over the ranks; small ones are 0."""
    heights = numpy.array([sum(map(height, bundle)) / ranks for bundle in packing.columns])
    sent = numpy.zeros((ranks, len(packing.columns)))
    for index, bundle in enumerate(packing.columns):
        for source, _ in _arcs(bundle):
            sent[source, index] += 1 / ranks**2
    weights = cheapest_weights(packing, capacities, _RATE_KEPT * packing.rate, heights - 1 - _WORTH_OF_RATE, sent)
    shares = weights / weights.sum()
    kept = numpy.where(shares >= _LEAST_WEIGHT, shares, 0.0)
    return numpy.asarray(kept / kept.sum() if kept.any() else shares)
