"""The best rate of synchronization if transfers may take all routes, and the prices of channels that prove it.

Each byte is summed along a tree of ranks to its root and copied along a tree of ranks from there. An arc of a tree is a
transfer between two ranks, whose bytes may be divided over any routes. Ranks sum, copy and forward; switches only
forward. Column generation solves the linear program over all such pairs of trees with all routes of their arcs. Under
channel prices the cheapest route of an arc is a shortest path. So the cheapest pair of trees is two minimum spanning
arborescences under the lengths of shortest paths. On symmetric links it is one minimum spanning tree, used both ways
(see :mod:`lightning_autosync.cluster.packing`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy
from numpy.typing import NDArray
from scipy.sparse import csc_array, csr_array
from scipy.sparse.csgraph import dijkstra

from lightning_autosync.cluster.columns import Vector, both_ways, generate_columns, without_traces
from lightning_autosync.cluster.link_graph import LinkGraph
from lightning_autosync.cluster.packing import best_packing, transfers_of
from lightning_autosync.cluster.trees import least_arborescence, least_tree

Transfers = list[tuple[int, int]]

Loads = tuple[int, ...]
"""Indices of the channels that a pair of trees uses, ascending, each once for each use."""

_HOP = 1e-12
"""Added to the price of each channel: among equally cheap routes, one with few hops is taken."""


def channel_prices(link_graph: LinkGraph) -> Vector:
    """[channels] prices under which each pair of trees costs at least 1 over any routes; for two or more ranks.

    The capacities of all channels cost as little as such prices allow, up to a millionth.

    Raises:
        ClusterError: the rates of the cluster are unknown.
    """
    routes, packing = _CheapestRoutes(link_graph), best_packing(link_graph)
    prices = packing.prices
    if not link_graph.single_routes:
        prices = generate_columns(link_graph.capacities, _columns(packing.loads), routes.loads, routes.trees).prices
    if link_graph.symmetric:
        prices = both_ways(prices)
    prices = without_traces(prices, link_graph.capacities)
    # A pair of trees may still cost less than 1 by the tolerance of the generation, but a bound has to hold for it too.
    least = float((routes.loads(list(routes.trees(prices))).T @ prices).min())
    return prices / min(least, 1.0)


def _columns(loads: csc_array) -> Iterator[Loads]:
    """The columns of a sparse matrix [channels, columns] of numbers of uses."""
    for start, end in zip(loads.indptr, loads.indptr[1:], strict=False):
        channels = numpy.repeat(loads.indices[start:end], loads.data[start:end].astype(int))
        yield tuple(numpy.sort(channels).tolist())


class _CheapestRoutes:
    """The cheapest trees and routes of a cluster under prices of its channels."""

    def __init__(self, link_graph: LinkGraph) -> None:
        places = link_graph.places
        self._symmetric = link_graph.symmetric
        self._ends = numpy.array([places[end] for end in link_graph.ends])
        self._channel_of = {arc: number for number, arc in enumerate(zip(*link_graph.arcs.tolist(), strict=True))}
        self._arcs = tuple(link_graph.arcs)
        self._shape = len(places), len(places)

    def loads(self, columns: Sequence[Loads]) -> csc_array:
        """The numbers of uses, as a sparse matrix [channels, columns]."""
        ends = numpy.cumsum([0, *map(len, columns)])
        rows = numpy.fromiter(chain.from_iterable(columns), dtype=numpy.int64)
        loads = csc_array((numpy.ones(len(rows)), rows, ends), shape=(len(self._channel_of), len(columns)))
        loads.sum_duplicates()
        return loads

    def trees(self, prices: Vector) -> Iterator[Loads]:
        """The loads of the cheapest pair of trees for each root; on symmetric links, of trees used both ways."""
        weights = (prices + prices[numpy.arange(len(prices)) ^ 1] if self._symmetric else prices) + _HOP
        graph = csr_array((weights, self._arcs), shape=self._shape)
        lengths, before = dijkstra(graph, indices=self._ends, return_predecessors=True)
        paths: dict[tuple[int, int], list[int]] = {}
        for transfers in self._transfers(lengths[:, self._ends]):
            for transfer in transfers:
                if transfer not in paths:
                    paths[transfer] = self._path(*transfer, before)
            used = [channel for transfer in transfers for channel in paths[transfer]]
            yield tuple(sorted([*used, *(channel ^ 1 for channel in used)] if self._symmetric else used))

    def _transfers(self, cost: Vector) -> Iterator[Transfers]:
        """Source and target rank of the arcs of the cheapest trees; on symmetric links in one direction only."""
        for root in range(len(cost)):
            if self._symmetric:
                yield sorted(least_tree(cost, root))
                continue
            yield transfers_of((least_arborescence(cost.T, root), least_arborescence(cost, root)))

    def _path(self, i: int, j: int, before: NDArray[numpy.int32]) -> list[int]:
        """Channels of the shortest path between two ranks; ``before`` [ranks, places] is the place before each."""
        place, source = int(self._ends[j]), int(self._ends[i])
        path = []
        while place != source:
            previous = int(before[i, place])
            path.append(self._channel_of[previous, place])
            place = previous
        return path
