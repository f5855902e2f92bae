"""Packing broadcasts into a cluster: the trees along which every rank sends data of its own to all other ranks.

A bundle has one tree from each rank. The linear program gives each bundle a share of the data, the same of every rank.
Under channel prices, the cheapest bundle consists of the minimum spanning arborescence from each rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

import numpy
from scipy.sparse import csc_array

from lightning_autosync.cluster.columns import Packing, Vector, cheapest_weights, generate_columns
from lightning_autosync.cluster.link_graph import LinkGraph
from lightning_autosync.cluster.packing import arc_costs, drop_small, filling_rate
from lightning_autosync.cluster.spec import ClusterSpec
from lightning_autosync.cluster.trees import (
    Parents,
    chains,
    height,
    hierarchical_tree,
    hierarchical_trees,
    least_arborescence,
    root_at,
)

Bundle = tuple[Parents, ...]
"""[ranks] the broadcast tree from each rank."""

MOST_RANKS = 16
"""Largest number of ranks for which bundles are generated. With more, each rank sends to every other rank, or along one
tree for each depth that follows nodes and racks."""
_RATE_KEPT = 0.97
"""Share of the best rate for which flat trees, then few bundles are preferred: rows are few, so that each further hop
and each further frame counts."""
_RATE_KEPT_IN_ALL = 0.96
_FULL = 0.9
"""Share of its capacity from which a channel counts as full."""
_MOST_OF_HUB = 0.5e9
"""Largest rate in bytes/s at which one rank, whose one thread moves them, should send the rows of all ranks. A hub was
measured at 50 MB/s only."""
_SHORT_LATENCY = 1e-3
"""Seconds of a route up to which a second hop is worth the even use of links."""
_SMALLEST_WEIGHTS = (0.02, 0.005, 0.001, 0.0)
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
    if filling_rate(_load([direct], link_graph) @ numpy.ones(1), capacities) >= _RATE_KEPT * packing.rate:
        bundle, rate = _with_few_full_channels(link_graph, _RATE_KEPT * packing.rate)
        return BroadcastPacking(rate, (1.0,), (bundle,))
    rates = numpy.array([filling_rate(loads, capacities) for loads in packing.loads.T.toarray()])
    if (alone := numpy.flatnonzero(rates >= _RATE_KEPT * packing.rate)).size:
        # One frame to each rank in place of several. Several bundles would only spread the forwarding over the ranks.
        heights = numpy.array([sum(map(height, packing.columns[index])) for index in alone])
        flattest = int(alone[heights == heights.min()][0])
        return BroadcastPacking(float(rates[flattest]), (1.0,), (packing.columns[flattest],))
    weights = _flat_weights(packing, capacities, spec.world_size)
    rate, weights = drop_small(weights, packing, capacities, _RATE_KEPT_IN_ALL * packing.rate, _SMALLEST_WEIGHTS)
    order = [int(index) for index in numpy.argsort(-weights, kind="stable") if weights[index] > 0]
    return BroadcastPacking(
        rate,
        tuple(float(weights[index]) for index in order),
        tuple(packing.columns[index] for index in order),
    )


def direct_bundle(ranks: int) -> Bundle:
    """Each rank sends to every other rank."""
    return tuple(tuple(-1 if rank == root else root for rank in range(ranks)) for root in range(ranks))


def hub_bundle(ranks: int, hub: int) -> Bundle:
    """Each rank sends to the hub, which sends to every other rank."""
    direct = direct_bundle(ranks)
    return tuple(
        tuple(parent if hub in (rank, root) or parent < 0 else hub for rank, parent in enumerate(direct[root]))
        for root in range(ranks)
    )


def _with_few_full_channels(link_graph: LinkGraph, least_rate: float) -> tuple[Bundle, float]:
    """The direct bundle, or a hub's that fills fewer channels at ``least_rate`` or more; and its rate.

    Where each rank sends to all others over links that are full in both directions, TCP divides them unevenly: some
    connections end late, and others' links are idle then.
    """
    ranks, capacities = link_graph.world_size, link_graph.capacities
    near = 2 < ranks <= MOST_RANKS and all(
        link_graph.latency(*pair) <= _SHORT_LATENCY for pair in permutations(range(ranks), 2)
    )
    hubs = range(ranks) if near else ()
    bundles = [direct_bundle(ranks), *(hub_bundle(ranks, hub) for hub in hubs)]
    loads = _load(bundles, link_graph).toarray().T
    rates = [filling_rate(load, capacities) for load in loads]
    allowed = [0, *(1 + hub for hub in hubs if least_rate <= rates[1 + hub] <= _MOST_OF_HUB / (ranks - 1) ** 2)]
    full = [(loads[index] * rates[index] >= _FULL * capacities).sum() for index in range(len(bundles))]
    chosen = min(allowed, key=lambda index: full[index])
    return bundles[chosen], rates[chosen]


def _best(link_graph: LinkGraph) -> Packing[Bundle]:
    count = link_graph.world_size

    def load(bundles: Sequence[Bundle]) -> csc_array:
        return _load(bundles, link_graph)

    # Each bundle is count^2 numbers, and its load needs count^2 routes; so with many ranks a few bundles have to do.
    if count > MOST_RANKS:
        return generate_columns(link_graph.capacities, _few_seeds(link_graph.spec), load, lambda _: ())
    costs = arc_costs(link_graph)

    def price(duals: Vector) -> Iterator[Bundle]:
        cost = costs(duals)
        yield tuple(least_arborescence(cost, root) for root in range(count))

    return generate_columns(link_graph.capacities, _seeds(link_graph.spec), load, price)


def _seeds(spec: ClusterSpec) -> Iterator[Bundle]:
    ranks = spec.world_size
    yield direct_bundle(ranks)
    for tree in (*hierarchical_trees(spec.hierarchy(), ranks), *chains(ranks)):
        yield tuple(root_at(tree, root, ranks) for root in range(ranks))


def _few_seeds(spec: ClusterSpec) -> Iterator[Bundle]:
    """The direct bundle, and for each depth of the hierarchy the bundle in which each rank is the hub of its tree."""
    ranks, hierarchy = spec.world_size, spec.hierarchy()
    yield direct_bundle(ranks)
    for depth in range(1, len(hierarchy) + 1):
        yield tuple(
            root_at(hierarchical_tree(hierarchy[:depth], ranks, root, root), root, ranks) for root in range(ranks)
        )


def _load(bundles: Sequence[Bundle], link_graph: LinkGraph) -> csc_array:
    """[channels, bundles] number of times that the trees of each bundle cross each channel."""
    return link_graph.load_rows([list(_arcs(bundle)) for bundle in bundles]).T.tocsc()


def _arcs(bundle: Iterable[Parents]) -> Iterator[tuple[int, int]]:
    for tree in bundle:
        yield from ((parent, rank) for rank, parent in enumerate(tree) if parent >= 0)


def _flat_weights(packing: Packing[Bundle], capacities: Vector, ranks: int) -> Vector:
    """[bundles] weights of flat trees that spread the forwarding over the ranks, near the best rate."""
    heights = numpy.array([sum(map(height, bundle)) / ranks for bundle in packing.columns])
    sent = numpy.zeros((ranks, len(packing.columns)))
    for index, bundle in enumerate(packing.columns):
        for source, _ in _arcs(bundle):
            sent[source, index] += 1 / ranks**2
    return cheapest_weights(packing, capacities, _RATE_KEPT * packing.rate, heights - 1 - _WORTH_OF_RATE, sent)
