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


@lru_cache(maxsize=4096)
def second_root(cluster: ClusterSpec, reduce: Tree, broadcast: Tree) -> int:
    """The child of the root that makes the longest way up and down the trees shortest as a second root; -1 for none."""
    if not 1 < reduce.size <= MOST_RANKS:
        return -1
    hops = _hop_seconds(cluster)
    up, down = hops[reduce.interface], hops[broadcast.interface].T
    rising, falling = _heights(reduce, up), _heights(broadcast, down)
    root = reduce.root
    rises = {child: rising[child] + up[child, root] for child in reduce.children[root]}
    falls = {child: falling[child] + down[child, root] for child in broadcast.children[root]}
    best, second = (1 - LEAST_GAIN) * (max(rises.values()) + max(falls.values())), -1
    highest, lowest = nlargest(2, rises, key=rises.__getitem__), nlargest(2, falls, key=falls.__getitem__)
    for child in rises.keys() & falls.keys():
        rise = max((rises[other] for other in highest if other != child), default=0.0)
        fall = max((falls[other] for other in lowest if other != child), default=0.0)
        at_root = max(rise, rises[child]) + fall
        at_child = max(rising[child], rise + down[child, root]) + falling[child]
        if (length := max(at_root, at_child)) <= best and (length < best or second < 0 or child < second):
            best, second = length, child
    return second


def _heights(tree: Tree, hops: NDArray[numpy.float64]) -> Sequence[float]:
    """[ranks] seconds between each rank and the farthest leaf below it; ``hops`` [child, parent] are seconds."""
    heights, order = [0.0] * tree.size, [tree.root]
    for rank in order:
        order += tree.children[rank]
    for rank in reversed(order[1:]):
        parent = tree.parents[rank]
        heights[parent] = max(heights[parent], heights[rank] + float(hops[rank, parent]))
    return heights


@lru_cache(maxsize=16)
def _hop_seconds(cluster: ClusterSpec) -> NDArray[numpy.float64]:
    """[interfaces, sender, receiver] seconds of a piece on an idle route; 1 if the rates are unknown."""
    ranks, graph = cluster.world_size, LinkGraph(cluster)
    seconds = numpy.ones((cluster.interface_count, ranks, ranks))
    if cluster.measured:
        for interface, sender, receiver in numpy.ndindex(*seconds.shape):
            latency = sum(graph.channels[each].latency for each in graph.route(sender, receiver, interface))
            seconds[interface, sender, receiver] = latency + _PIECE / graph.bandwidth(sender, receiver, interface)
    return seconds
