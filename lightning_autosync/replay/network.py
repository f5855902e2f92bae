"""The cluster as arrays: channels, routes between ranks, and the hosts as channels of their own."""

from __future__ import annotations

import numba
import numpy
from numpy.typing import NDArray

from lightning_autosync.cluster import ClusterSpec, Topology
from lightning_autosync.replay.constants import Constants

Floats = NDArray[numpy.float64]
Integers = NDArray[numpy.int32]


class Network:
    """Channels by index: the cluster's links, one host for each rank, and the cores that all share, if any.

    A link carries ``capacities[c]`` bytes/s and, after a pause, up to ``burst[c]`` bytes at once; a host gives one
    core-second a second. Routes are found when first asked
    for and kept.

    Raises:
        ClusterError: the rates of the cluster are unknown.
    """

    def __init__(self, cluster: ClusterSpec, constants: Constants) -> None:
        self.topology = Topology(cluster)
        self.ranks = cluster.world_size
        self.links = len(self.topology.channels)
        shared = [constants.cores] if constants.cores else []
        self.capacities: Floats = numpy.concatenate(
            [self.topology.capacities, numpy.ones(self.ranks), numpy.array(shared, dtype=float)]
        )
        self.burst: Floats = numpy.where(
            numpy.arange(len(self.capacities)) < 2 * len(cluster.links), constants.burst, 0.0
        )
        self.shared_core = self.links + self.ranks if shared else -1
        self.route_of: Integers = numpy.full((self.ranks, self.ranks), -1, dtype=numpy.int32)
        self.starts: Integers = numpy.zeros(1, dtype=numpy.int32)
        self.hops: Integers = numpy.zeros(0, dtype=numpy.int32)
        self.latencies: Floats = numpy.zeros(0)
        self._forest = _parents(self.topology)

    def channel_names(self) -> tuple[str, ...]:
        """A name for each channel: ``a > b`` for links, then the hosts."""
        links = [f"{channel.source} > {channel.target}" for channel in self.topology.channels]
        hosts = [f"host of rank {rank}" for rank in range(self.ranks)]
        return (*links, *hosts, *(["shared cores"] if self.shared_core >= 0 else []))

    def find_routes(self, pairs: NDArray[numpy.int64]) -> None:
        """Make sure that the routes of ``pairs`` [count] (``source * ranks + target``, each once) are known."""
        pairs = pairs[self.route_of.reshape(-1)[pairs] < 0]
        if not len(pairs):
            return
        sources, targets = numpy.divmod(pairs, self.ranks)
        if self._forest is None:
            routes = [self.topology.route(int(i), int(j)) for i, j in zip(sources, targets, strict=True)]
            counts = numpy.array([len(route) for route in routes])
            hops = numpy.fromiter((channel for route in routes for channel in route), dtype=numpy.int32)
        else:
            ends, above, channel_up, depth = self._forest
            places = ends[sources], ends[targets]
            counts = _lengths(*places, above, depth)
            hops = _walk(*places, above, channel_up, depth, counts)
        self.route_of.reshape(-1)[pairs] = len(self.latencies) + numpy.arange(len(pairs))
        edges = numpy.concatenate([[0], numpy.cumsum(counts)]).astype(numpy.int32)
        channel_latencies = numpy.array([channel.latency for channel in self.topology.channels])
        running = numpy.concatenate([[0.0], numpy.cumsum(channel_latencies[hops])])
        self.latencies = numpy.concatenate([self.latencies, running[edges[1:]] - running[edges[:-1]]])
        self.starts = numpy.concatenate([self.starts, self.starts[-1] + edges[1:]])
        self.hops = numpy.concatenate([self.hops, hops])


def _parents(topology: Topology) -> tuple[Integers, Integers, Integers, Integers] | None:
    """Where links form a tree, routes need no search: each place's way towards a root. None elsewhere.

    Returns the place of each rank; and of each place its parent, the channel to the parent (the way back is that
    index with its lowest bit flipped), and its depth.
    """
    place: dict[str, int] = {}
    around: list[list[tuple[int, int]]] = []
    for index, channel in enumerate(topology.channels):
        for end in (channel.source, channel.target):
            if end not in place:
                place[end] = len(place)
                around.append([])
        around[place[channel.source]].append((place[channel.target], index))
    if not place or len(topology.channels) != 2 * (len(place) - 1):
        return None
    above, channel_up, depth = (numpy.full(len(place), -1, dtype=numpy.int32) for _ in range(3))
    depth[0] = 0
    reached = [0]
    for here in reached:
        for there, index in around[here]:
            if depth[there] < 0:
                above[there], channel_up[there], depth[there] = here, index ^ 1, depth[here] + 1
                reached.append(there)
    spec = topology.spec
    names = [spec.nodes[index] for index in spec.rank_nodes]
    ends = [place[f"rank {rank}" if node.devices > 1 else node.name] for rank, node in enumerate(names)]
    return numpy.array(ends, dtype=numpy.int32), above, channel_up, depth


@numba.njit(cache=True)
def _lengths(sources: Integers, targets: Integers, above: Integers, depth: Integers) -> NDArray[numpy.int64]:
    counts = numpy.zeros(len(sources), dtype=numpy.int64)
    for index in range(len(sources)):
        i, j = sources[index], targets[index]
        while i != j:
            counts[index] += 1
            if depth[i] >= depth[j]:
                i = above[i]
            else:
                j = above[j]
    return counts


@numba.njit(cache=True)
def _walk(
    sources: Integers,
    targets: Integers,
    above: Integers,
    channel_up: Integers,
    depth: Integers,
    counts: NDArray[numpy.int64],
) -> Integers:
    """The channels of the routes, one route after the other; each is filled in from both of its ends."""
    hops = numpy.empty(counts.sum(), dtype=numpy.int32)
    edge = 0
    for index in range(len(sources)):
        i, j = sources[index], targets[index]
        front, edge = edge, edge + counts[index]
        back = edge
        while i != j:
            if depth[i] >= depth[j]:
                hops[front] = channel_up[i]
                front += 1
                i = above[i]
            else:
                back -= 1
                hops[back] = channel_up[j] ^ 1
                j = above[j]
    return hops
