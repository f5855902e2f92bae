"""Meshes of a cluster's ranks, and the speed of transfers along their dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy
from numpy.typing import NDArray

from lightning_autosync.cluster import ClusterSpec, LinkGraph

MOST_DIMENSIONS = 3
"""Largest number of dimensions of a mesh in the search."""


def shapes(ranks: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of all meshes with ``ranks`` ranks, in each order of dimensions; fewest dimensions first."""
    found = [shape for count in range(1, MOST_DIMENSIONS + 1) for shape in _factors(ranks, count)]
    return tuple(found) or ((1,),)


def _factors(product: int, count: int) -> Iterator[tuple[int, ...]]:
    if count == 1:
        if product > 1:
            yield (product,)
        return
    for first in range(2, product // 2 + 1):
        if product % first == 0:
            for rest in _factors(product // first, count - 1):
                yield first, *rest


def near_order(cluster: ClusterSpec) -> tuple[int, ...]:
    """The ranks in an order in which close ranks are neighbours: by switch, then by node."""
    levels = cluster.hierarchy()
    place = [
        [next(number for number, group in enumerate(level) if rank in group) for level in reversed(levels)]
        for rank in range(cluster.world_size)
    ]
    return tuple(sorted(range(cluster.world_size), key=lambda rank: (*place[rank], rank)))


@dataclass(frozen=True)
class Pace:
    """The speed of transfers within groups of ranks, with all groups active at once.

    Attributes:
        ring: seconds per byte that every rank sends to the next rank of its group.
        spread: seconds per byte that every rank sends to the others of its group, in equal shares.
        latency: largest latency in seconds between neighbours in a group.
    """

    ring: float
    spread: float
    latency: float


class Links:
    """The links of a cluster, as used by groups of its ranks.

    Raises:
        ClusterError: the rates of the links are unknown.
    """

    def __init__(self, cluster: ClusterSpec) -> None:
        self.cluster = cluster
        self._topology = LinkGraph(cluster)
        self._capacities = self._topology.capacities
        self._paces: dict[tuple[tuple[int, ...], ...], Pace] = {}

    def pace(self, groups: Sequence[Sequence[int]]) -> Pace:
        """The pace of disjoint groups of equal size."""
        key = tuple(map(tuple, groups))
        if key not in self._paces:
            self._paces[key] = self._measure(numpy.array(key))
        return self._paces[key]

    def _measure(self, groups: NDArray[numpy.int64]) -> Pace:
        size = groups.shape[1]
        if size == 1:
            return Pace(0.0, 0.0, 0.0)
        sources, targets = groups.ravel(), numpy.roll(groups, -1, axis=1).ravel()
        if self._tree is None:
            return self._routed(groups, list(zip(sources.tolist(), targets.tolist(), strict=True)))
        below, channels = self._tree
        up = (below[:, sources] & ~below[:, targets]).sum(axis=1)
        down = (below[:, targets] & ~below[:, sources]).sum(axis=1)
        inside = below[:, groups].sum(axis=2)
        across = (inside * (size - inside)).sum(axis=1) / (size - 1)
        seconds = numpy.array([self._topology.channels[channel].latency for channel in channels])
        latency = float(((below[:, sources] ^ below[:, targets]) * seconds[:, None]).sum(axis=0).max())
        away, toward = self._capacities[channels], self._capacities[channels ^ 1]
        ring, spread = (
            float(max((ups / away).max(initial=0.0), (downs / toward).max(initial=0.0)))
            for ups, downs in ((up, down), (across, across))
        )
        return Pace(ring, spread, latency)

    def _routed(self, groups: NDArray[numpy.int64], ring: list[tuple[int, int]]) -> Pace:
        """The pace if links form loops: transfers take the routes of the link graph."""
        pairs = [(int(i), int(j)) for group in groups for i in group for j in group if i != j]
        spread = self._topology.loads(pairs) / (groups.shape[1] - 1)
        latency = max(self._topology.latency(*pair) for pair in ring)
        loads = self._topology.loads(ring)
        ring_seconds, spread_seconds = (float((load / self._capacities).max()) for load in (loads, spread))
        return Pace(ring_seconds, spread_seconds, latency)

    @cached_property
    def _tree(self) -> tuple[NDArray[numpy.bool_], NDArray[numpy.int32]] | None:
        """[links, ranks] whether a rank is below a link, seen from the root, and [links] the channel upwards.

        None if links form loops.
        """
        tree = self._topology.trees[0]
        if tree is None:
            return None
        below = numpy.zeros((len(tree.above), self.cluster.world_size), dtype=bool)
        for rank, place in enumerate(tree.ends):
            while tree.above[place] >= 0:
                below[place, rank] = True
                place = tree.above[place]
        return below[1:], tree.channel_up[1:]  # the root comes first
