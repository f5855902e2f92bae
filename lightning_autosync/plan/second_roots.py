"""Which trees have two roots: those whose longest way becomes shorter by that; see `TreeTransfer`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import nlargest

import numpy
from numpy.typing import NDArray

from lightning_autosync.cluster import ClusterSpec, LinkGraph
from lightning_autosync.plan.trees import Tree

LEAST_GAIN = 0.1
"""Share of the longest way that a second root must save: it adds up every piece once more, and copies it."""
MOST_RANKS = 128
"""Among more ranks, trees have one root: every hop's route is looked up, and trees of many ranks have many hops."""
_PIECE = 32 * 1024
"""Bytes of a piece, a small one: larger ones make hops over slow links longer."""


@lru_cache(maxsize=16)
def second_roots(cluster: ClusterSpec) -> SecondRoots:
    """The second roots of trees on a cluster; plans for it share them, because they use few different trees."""
    return SecondRoots(_hop_seconds(cluster) if cluster.world_size <= MOST_RANKS else None)


class SecondRoots:
    """Finds second roots.

    Args:
        hops: [interfaces, sender, receiver] seconds of a hop; None if all trees have one root.
    """

    def __init__(self, hops: NDArray[numpy.float64] | None) -> None:
        self._hops = hops
        self._found: dict[tuple[Tree, Tree], int] = {}

    def of(self, reduce: Tree, broadcast: Tree) -> int:
        """The child of the root that makes the longest way up and down shortest as a second root; -1 for none."""
        if self._hops is None or reduce.size == 1 or reduce.interface != broadcast.interface:
            return -1
        if (reduce, broadcast) not in self._found:
            self._found[reduce, broadcast] = _best_child(reduce, broadcast, self._hops[reduce.interface])
        return self._found[reduce, broadcast]


def _best_child(reduce: Tree, broadcast: Tree, hops: NDArray[numpy.float64]) -> int:
    root, up, down = reduce.root, hops, hops.T
    rising, falling = _heights(reduce, up), _heights(broadcast, down)
    rises = {child: rising[child] + up[child, root] for child in reduce.children[root]}
    falls = {child: falling[child] + down[child, root] for child in broadcast.children[root]}
    best, second = (1 - LEAST_GAIN) * (max(rises.values()) + max(falls.values())), -1
    highest, lowest = nlargest(2, rises, key=rises.__getitem__), nlargest(2, falls, key=falls.__getitem__)
    for child in sorted(rises.keys() & falls.keys()):
        rise = max((rises[other] for other in highest if other != child), default=0.0)
        fall = max((falls[other] for other in lowest if other != child), default=0.0)
        at_root = max(rise, rises[child]) + fall
        at_child = max(rising[child], rise + down[child, root]) + falling[child]
        if (length := max(at_root, at_child)) < best or (length == best and second < 0):
            best, second = length, child
    return second


def _heights(tree: Tree, hops: NDArray[numpy.float64]) -> Sequence[float]:
    """[ranks] seconds between each rank and the farthest leaf below it; ``hops`` [child, parent] are seconds."""
    heights = [0.0] * tree.size
    for rank in tree.upwards:
        if (parent := tree.parents[rank]) >= 0:
            heights[parent] = max(heights[parent], heights[rank] + float(hops[rank, parent]))
    return heights


def _hop_seconds(cluster: ClusterSpec) -> NDArray[numpy.float64]:
    """[interfaces, sender, receiver] seconds of a piece on an idle route; 1 if the rates are unknown."""
    ranks, graph = cluster.world_size, LinkGraph(cluster)
    seconds = numpy.ones((cluster.interface_count, ranks, ranks))
    if cluster.measured:
        for interface, sender, receiver in numpy.ndindex(*seconds.shape):
            latency = sum(graph.channels[each].latency for each in graph.route(sender, receiver, interface))
            seconds[interface, sender, receiver] = latency + _PIECE / graph.bandwidth(sender, receiver, interface)
    return seconds
