"""Classes of nodes that a cluster cannot tell apart, and what an edge between two ranks of them loads.

Two nodes are alike if each has one link, both links lead to the same place with the same rates, and both nodes have as
many devices. Latencies may differ: that of a node's only link is on all of its routes, so it decides on none. To
exchange two alike nodes, or two devices of a node, changes neither rates nor routes. So channels fall into sets of
alike channels (*orbits*), and an edge of a tree loads them by the classes of its ends alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy
from numpy.typing import NDArray

from lightning_autosync.cluster.columns import Vector
from lightning_autosync.cluster.link_graph import LinkGraph
from lightning_autosync.cluster.spec import ClusterSpec

MOST_CLASSES = 64
"""Largest number of classes that is used; the programs grow with the pairs of classes."""

_NONE = -1

Leaf = tuple[int, int]
"""Channels out of a node (or a device) and into it, over its only link."""


class RankClasses:
    """The classes of a cluster, with the kinds of edges between their ranks.

    An edge of a tree is used in both directions. Its kind is *inner* (two devices of a node), *outer* (two nodes of a
    class), or a pair of classes. Kinds are numbered: inner of each class, outer of each class, then pairs.

    Attributes:
        link_graph: channels and routes.
        nodes: [classes] for each node of the class its ranks, ascending.
        pairs: pairs (a, b) of different classes, a < b, in the order of their kinds.
        orbit: [channels] orbit of each channel. A channel that no other channel is like is an orbit by itself.
        capacities: [orbits] bytes/s of all channels of the orbit together.
        rows: [kinds, orbits] uses of the orbit by an edge of the kind, both ways; 0 for edges that do not exist.
    """

    def __init__(self, link_graph: LinkGraph, groups: list[list[int]]) -> None:
        spec = link_graph.spec
        self.link_graph = link_graph
        self.nodes = [[spec.ranks_of(index) for index in group] for group in groups]
        self.pairs = list(itertools.combinations(range(len(groups)), 2))
        self._class_of = numpy.empty(len(spec.nodes), dtype=numpy.int64)
        for number, group in enumerate(groups):
            self._class_of[group] = number
        self._node_of = numpy.array(spec.rank_nodes)
        self._links = _leaf_links(spec)
        self._devices = numpy.array(list(_device_channels(spec)), dtype=numpy.int64).reshape(-1, 2)
        self.orbit = self._find_orbits()
        self.capacities: Vector = numpy.bincount(self.orbit, link_graph.capacities).astype(numpy.float64)
        self.rows: Vector = numpy.array([self._row(edge) for edge in self._examples()])

    def __len__(self) -> int:
        return len(self.nodes)

    def loads(self, edges: NDArray[numpy.int64]) -> Vector:
        """[channels] number of uses by a tree's ``edges`` [edges, 2], each used in both directions."""
        nodes = self._node_of[edges]
        crossing = nodes[:, 0] != nodes[:, 1]
        counts = numpy.bincount(self._kinds(nodes), minlength=len(self.rows))
        loads: Vector = (counts @ self.rows)[self.orbit]  # right for each orbit of one channel
        node_uses = numpy.bincount(nodes[crossing].ravel(), minlength=len(self._links))
        rank_uses = numpy.bincount(edges.ravel(), minlength=len(self._devices))
        for channels, uses in ((self._links, node_uses), (self._devices, rank_uses)):
            has_link = channels[:, 0] != _NONE
            loads[channels[has_link]] = uses[has_link, None]
        return loads

    def _kinds(self, nodes: NDArray[numpy.int64]) -> NDArray[numpy.int64]:
        """[edges] kind of each edge between ``nodes`` [edges, 2]."""
        count = len(self)
        pair_kind = numpy.zeros((count, count), dtype=numpy.int64)
        for kind, (a, b) in enumerate(self.pairs, 2 * count):
            pair_kind[a, b] = pair_kind[b, a] = kind
        pair_kind[numpy.diag_indices(count)] = numpy.arange(count, 2 * count)
        one, other = self._class_of[nodes].T
        kinds: NDArray[numpy.int64] = numpy.where(nodes[:, 0] == nodes[:, 1], one, pair_kind[one, other])
        return kinds

    def _find_orbits(self) -> NDArray[numpy.int64]:
        count = len(self.link_graph.channels)
        first = numpy.arange(count)  # [channels] the first channel of its orbit
        for nodes in self.nodes:
            ranks = [rank for node in nodes for rank in node]
            for channels in (self._links[self._node_of[[node[0] for node in nodes]]], self._devices[ranks]):
                if channels[0, 0] != _NONE:
                    first[channels] = channels[0]
        return numpy.unique(first, return_inverse=True)[1]

    def _examples(self) -> Iterator[tuple[int, int] | None]:
        """An edge of each kind; None where there is none."""
        for nodes in self.nodes:
            yield (nodes[0][0], nodes[0][1]) if len(nodes[0]) > 1 else None
        for nodes in self.nodes:
            yield (nodes[0][0], nodes[1][0]) if len(nodes) > 1 else None
        for a, b in self.pairs:
            yield self.nodes[a][0][0], self.nodes[b][0][0]

    def _row(self, edge: tuple[int, int] | None) -> Vector:
        count = len(self.capacities)
        if edge is None:
            return numpy.zeros(count)
        route = self.link_graph.route(*edge) + self.link_graph.route(*edge[::-1])
        return numpy.bincount(self.orbit[list(route)], minlength=count).astype(float)

    def routes_agree(self) -> bool:
        """Whether all routes between two classes use the same channels besides those of the ends.

        They do if the lowest rank of each class and the highest of the other do, because routes between alike nodes
        differ only where two paths are equally good and the order of the ranks decides.
        """
        for a, b in itertools.permutations(range(len(self)), 2):
            lows = [min(rank for node in self.nodes[one] for rank in node) for one in (a, b)]
            highs = [max(rank for node in self.nodes[one] for rank in node) for one in (a, b)]
            if self._between(lows[0], highs[1]) != self._between(highs[0], lows[1]):
                return False
        return True

    def _between(self, i: int, j: int) -> tuple[int, ...]:
        ends = {int(channel) for rank in (i, j) for channel in self._links[self._node_of[rank]]}
        ends.update(int(channel) for rank in (i, j) for channel in self._devices[rank])
        return tuple(channel for channel in self.link_graph.route(i, j) if channel not in ends)


def rank_classes(link_graph: LinkGraph) -> RankClasses | None:
    """The classes of a cluster; None if there are too many of them, or if the order of the ranks decides on routes."""
    spec = link_graph.spec
    links = _leaf_links(spec)
    groups: dict[object, list[int]] = {}
    for index, node in enumerate(spec.nodes):
        key: object = index
        if links[index, 0] != _NONE:
            out, back = (link_graph.channels[channel] for channel in links[index])
            key = (out.target, out.bandwidth, back.bandwidth, node.devices)
        groups.setdefault(key, []).append(index)
    if len(groups) > MOST_CLASSES:
        return None
    classes = RankClasses(link_graph, list(groups.values()))
    return classes if classes.routes_agree() else None


def _leaf_links(spec: ClusterSpec) -> NDArray[numpy.int64]:
    """[nodes, 2] channels out of and into each node over its only link; -1 if it has none or several.

    The link of two places that have no other link is left out, because it would be the only link of both.
    """
    links_of: dict[str, list[int]] = {}
    for number, link in enumerate(spec.links):
        links_of.setdefault(link.a, []).append(number)
        links_of.setdefault(link.b, []).append(number)
    channels = numpy.full((len(spec.nodes), 2), _NONE)
    for index, node in enumerate(spec.nodes):
        if len(numbers := links_of.get(node.name, [])) != 1:
            continue
        link = spec.links[numbers[0]]
        out = 2 * numbers[0] + (link.b == node.name)
        if len(links_of[link.b if link.a == node.name else link.a]) > 1:
            channels[index] = out, out ^ 1
    return channels


def _device_channels(spec: ClusterSpec) -> Iterator[Leaf]:
    """For each rank the channels of its local link, in the order of :class:`LinkGraph`; -1 if it has none."""
    channel = 2 * len(spec.links)
    for index in spec.rank_nodes:
        shared = spec.nodes[index].devices > 1
        yield (channel, channel + 1) if shared else (_NONE, _NONE)
        channel += 2 * shared
