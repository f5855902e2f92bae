"""The cluster as arrays: channels, routes, token buckets and the trees of schedules."""

from __future__ import annotations

from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from lightning_autosync.cluster import ClusterSpec, LinkGraph
from lightning_autosync.replay.compiled import compiled
from lightning_autosync.replay.constants import Constants

Flags = NDArray[numpy.bool_]
Floats = NDArray[numpy.float64]
Integers = NDArray[numpy.int32]
Indices = NDArray[numpy.int64]


class Routes(NamedTuple):
    """Routes between ranks.

    Attributes:
        between: [interfaces * ranks, ranks] index of the route from one rank to another; -1 while it is unknown. The
            rows are the ranks with their first interface, then with their second one, and so on.
        starts: [routes + 1] offset of each route's channels in ``hops``.
        hops: channels of all routes, one route after the other.
        latencies: [routes] seconds.
    """

    between: Integers
    starts: Integers
    hops: Integers
    latencies: Floats


class Trees(NamedTuple):
    """Trees of schedules, as arrays [trees, ranks].

    Attributes:
        parents: parent of each rank, as in `Tree.parents`.
        order: ranks in topological order, each after its parent.
        sizes: number of ranks in the subtree of each rank, itself included.
        first: [trees] row of rank 0 in `Routes.between` for the tree's interface; a multiple of the number of ranks.
    """

    parents: Integers
    order: Integers
    sizes: Integers
    first: Integers


class NetworkArrays:
    """Channels by index: the directions of the cluster's links, one host for each rank, and the shared cores, if any.

    Connections between ranks have the numbers ``row * ranks + target``, where ``row`` is the sender's in
    `Routes.between`: that of its interface and rank. There are ``pairs`` such numbers.

    A link carries ``capacities[c]`` bytes/s and, after a pause, up to ``burst[c]`` bytes at once. A host has one
    core-second per second. Routes are computed on first use and cached.

    Raises:
        ClusterError: the rates of the cluster are unknown.
    """

    def __init__(self, cluster: ClusterSpec, constants: Constants) -> None:
        self.link_graph = LinkGraph(cluster)
        self.ranks = cluster.world_size
        rows = cluster.interface_count * self.ranks
        self.pairs = rows * self.ranks
        self.links = len(self.link_graph.channels)
        shared = [constants.cores] if constants.cores else []
        self.capacities: Floats = numpy.concatenate(
            [self.link_graph.capacities, numpy.ones(self.ranks), numpy.array(shared, dtype=float)]
        )
        # Only the cluster's links are shaped; the local links that follow them have no burst.
        self.burst: Floats = numpy.where(
            numpy.arange(len(self.capacities)) < 2 * len(cluster.links), constants.burst, 0.0
        )
        self.shared_core = self.links + self.ranks if shared else -1
        self.routes = Routes(
            numpy.full((rows, self.ranks), -1, dtype=numpy.int32),
            numpy.zeros(1, dtype=numpy.int32),
            numpy.zeros(0, dtype=numpy.int32),
            numpy.zeros(0),
        )

    def channel_names(self) -> tuple[str, ...]:
        """A name for each channel: ``a > b`` for links, then the hosts and the shared cores."""
        links = [channel.name for channel in self.link_graph.channels]
        hosts = [f"host of rank {rank}" for rank in range(self.ranks)]
        return (*links, *hosts, *(["shared cores"] if self.shared_core >= 0 else []))

    def find_routes(self, pairs: Indices) -> None:
        """Compute the missing routes of ``pairs`` [count], distinct numbers of connections."""
        known = self.routes
        pairs = numpy.sort(pairs[known.between.reshape(-1)[pairs] < 0])
        if not len(pairs):
            return
        edges = numpy.searchsorted(pairs, self.ranks**2 * numpy.arange(1, len(known.between) // self.ranks))
        found = [self._routes_over(interface, part) for interface, part in enumerate(numpy.split(pairs, edges))]
        counts, hops = (numpy.concatenate(each) for each in zip(*found, strict=True))
        known.between.reshape(-1)[pairs] = len(known.latencies) + numpy.arange(len(pairs))
        ends = numpy.concatenate([[0], numpy.cumsum(counts)]).astype(numpy.int32)
        channel_latencies = numpy.array([channel.latency for channel in self.link_graph.channels])
        running = numpy.concatenate([[0.0], numpy.cumsum(channel_latencies[hops])])
        self.routes = Routes(
            known.between,
            numpy.concatenate([known.starts, known.starts[-1] + ends[1:]]),
            numpy.concatenate([known.hops, hops]),
            numpy.concatenate([known.latencies, running[ends[1:]] - running[ends[:-1]]]),
        )

    def _routes_over(self, interface: int, pairs: Indices) -> tuple[Indices, Integers]:
        """The numbers of channels of the routes of ``pairs`` over one interface, and the channels of all of them."""
        rows, targets = numpy.divmod(pairs, self.ranks)
        sources, tree = rows - interface * self.ranks, self.link_graph.trees[interface]
        if tree is not None:
            places = tree.ends[sources], tree.ends[targets]
            counts = _lengths(*places, tree.above, tree.depth)
            return counts, _walk(*places, tree.above, tree.channel_up, tree.depth, counts)
        ways = zip(sources.tolist(), targets.tolist(), strict=True)
        routes = [self.link_graph.route(source, target, interface) for source, target in ways]
        hops = numpy.fromiter((channel for route in routes for channel in route), dtype=numpy.int32)
        return numpy.array([len(route) for route in routes], dtype=numpy.int64), hops


@compiled
def _lengths(sources: Integers, targets: Integers, above: Integers, depth: Integers) -> Indices:
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


@compiled
def _walk(
    sources: Integers,
    targets: Integers,
    above: Integers,
    channel_up: Integers,
    depth: Integers,
    counts: Indices,
) -> Integers:
    """The channels of the routes, one route after the other; each route is filled in from both ends."""
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


NOTHING = -1
"""Stands for no tree: the flow does not travel in this direction."""


class Forest:
    """Assigns indices to trees. ``trees`` has the trees as of the last `settle`."""

    def __init__(self, network: NetworkArrays) -> None:
        self.ranks = network.ranks
        none: Integers = numpy.zeros((0, self.ranks), dtype=numpy.int32)
        self.trees = Trees(none, none, none, none[:, 0])
        self._network = network
        self._rows: dict[tuple[tuple[int, ...], int], int] = {}
        self._stars: dict[int, int] = {}
        self._new: list[tuple[NDArray[numpy.int32], int]] = []

    def row(self, parents: tuple[int, ...], interface: int = 0) -> int:
        """The index of a tree over an interface; ``trees`` contains it after `settle`."""
        found = self._rows.get((parents, interface))
        if found is None:
            found = self._rows[parents, interface] = self._add(numpy.array(parents, dtype=numpy.int32), interface)
        return found

    def star(self, root: int) -> int:
        """The index of the star around ``root``."""
        found = self._stars.get(root)
        if found is None:
            parents = numpy.full(self.ranks, root, dtype=numpy.int32)
            parents[root] = -1
            found = self._stars[root] = self._add(parents)
        return found

    def settle(self) -> None:
        """Add new trees to ``trees``, and their routes to the network."""
        if not self._new:
            return
        parents = numpy.stack([parents for parents, _ in self._new])
        first = numpy.array([interface * self.ranks for _, interface in self._new], dtype=numpy.int32)
        self._new = []
        made = Trees(parents, *_measure(parents), first)
        self.trees = Trees(*(numpy.concatenate(both) for both in zip(self.trees, made, strict=True)))
        used = numpy.zeros(self._network.routes.between.shape, dtype=numpy.bool_)
        rows, children = numpy.nonzero(parents >= 0)
        above = parents[rows, children]
        used[first[rows] + children, above] = True
        used[first[rows] + above, children] = True
        self._network.find_routes(numpy.flatnonzero(used))

    def _add(self, parents: NDArray[numpy.int32], interface: int = 0) -> int:
        self._new.append((parents, interface))
        return len(self.trees.parents) + len(self._new) - 1


@compiled
def _measure(parents: Integers) -> tuple[Integers, Integers]:
    """Orders (each rank after its parent) and subtree sizes of trees [trees, ranks]."""
    trees, ranks = parents.shape
    order, sizes = numpy.empty_like(parents), numpy.ones_like(parents)
    missing = numpy.empty(ranks, dtype=numpy.int32)
    for tree in range(trees):
        missing[:] = 0
        for rank in range(ranks):
            if parents[tree, rank] >= 0:
                missing[parents[tree, rank]] += 1
        # The order is filled from the back: leaves first, then each rank once its whole subtree is placed.
        place, head = ranks, ranks
        for rank in range(ranks):
            if missing[rank] == 0:
                place -= 1
                order[tree, place] = rank
        while head > 0:
            head -= 1
            rank = order[tree, head]
            parent = parents[tree, rank]
            if parent >= 0:
                sizes[tree, parent] += sizes[tree, rank]
                missing[parent] -= 1
                if missing[parent] == 0:
                    place -= 1
                    order[tree, place] = parent
    return order, sizes
