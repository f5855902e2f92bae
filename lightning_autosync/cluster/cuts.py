"""Cuts: channels that all data must cross, which bound how fast a cluster can synchronize.

After synchronizing a size, every rank has the sum of all ranks' data of that many bytes. Let the ranks be divided into
``k`` parts. The reduce and the broadcast of a byte each take at least ``k - 1`` transfers between parts. So the
channels out of all parts together carry at least ``2 (k - 1)`` times the size, and so do the channels into all parts.
The size also leaves and enters each part at least once. This holds for all routes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from lightning_autosync.cluster.link_graph import LinkGraph

_NOWHERE = -1
"""Stands for the part of places that are in no part."""


@dataclass(frozen=True, order=True)
class Cut:
    """One bound: ``size <= rate x seconds + links x burst``.

    Attributes:
        rate: largest rate of synchronization over the cut, in bytes/s.
        links: bytes that are synchronized at once for each byte of burst per direction of a link.
    """

    rate: float
    links: float

    def seconds(self, size: float, burst: float = 0.0) -> float:
        """Lower bound in seconds for ``size`` bytes, if each idle link passes ``burst`` bytes at once."""
        return max(0.0, size - self.links * burst) / self.rate


def one_switch_cuts(bandwidths: Iterable[float]) -> list[Cut]:
    """Cuts for two or more ranks, each with its own link to one switch; together they are exact."""
    rates = list(bandwidths)
    crossings = 2 * (len(rates) - 1)
    return undominated([Cut(min(rates), 1.0), Cut(sum(rates) / crossings, len(rates) / crossings)])


def find_cuts(link_graph: LinkGraph) -> list[Cut]:
    """The cuts around every rank and every node, and around the parts that remain connected without each place.

    On a tree of links these are the cuts of every link and every switch.
    """
    graph = _PlaceGraph(link_graph)
    cuts = set(graph.cuts(graph.by_rank)) | set(graph.cuts(graph.by_node))
    for place in graph.inner:
        cuts.update(graph.cuts(graph.without(place)))
    return undominated(cuts)


def undominated(cuts: Iterable[Cut]) -> list[Cut]:
    """The cuts that are binding for some size and some burst, slowest first."""
    kept: list[Cut] = []
    for cut in sorted(cuts):
        if not kept or cut.links < kept[-1].links:
            kept.append(cut)
    return kept


class _PlaceGraph:
    """Channels between numbered places.

    Attributes:
        by_rank, by_node: [places] parts of the places, if each rank or each node is a part.
    """

    def __init__(self, link_graph: LinkGraph) -> None:
        channels = link_graph.channels
        names = dict.fromkeys(end for channel in channels for end in (channel.source, channel.target))
        index = {name: number for number, name in enumerate(names)}
        self._count = len(index)
        self._sources = numpy.array([index[channel.source] for channel in channels])
        self._targets = numpy.array([index[channel.target] for channel in channels])
        self._rates = link_graph.capacities
        # Only the cluster's links may have bursts; the local links that follow them have none.
        self._shaped = (numpy.arange(len(channels)) < 2 * len(link_graph.spec.links)).astype(float)
        self._ends = numpy.array([index[end] for end in link_graph.ends])
        self.by_rank = self._nowhere()
        self.by_rank[self._ends] = numpy.arange(len(self._ends))
        self.by_node = self._nowhere()
        for number, name in enumerate(node.name for node in link_graph.spec.nodes):
            self.by_node[index[name]] = number
        self.by_node[self._ends] = link_graph.spec.rank_nodes

    @property
    def inner(self) -> list[int]:
        """Places with several neighbours; without any other place, the rest stays connected."""
        neighbours = numpy.bincount(self._sources, minlength=self._count)
        return numpy.flatnonzero(neighbours > 1).tolist()

    def without(self, place: int) -> NDArray[numpy.int64]:
        """[places] parts: the components without a place, and the place itself; components without ranks are none."""
        kept = (self._sources != place) & (self._targets != place)
        ends = self._sources[kept], self._targets[kept]
        links = coo_array((numpy.ones(len(ends[0])), ends), shape=(self._count, self._count))
        _, labels = connected_components(links, directed=False)
        parts = self._nowhere()
        for number, label in enumerate(numpy.unique(labels[self._ends])):
            parts[labels == label] = number
        return parts

    def cuts(self, parts: NDArray[numpy.int64]) -> Iterator[Cut]:
        """The cuts around each part, and the one around all."""
        count = int(parts.max()) + 1
        if count < 2:
            return
        crossing = parts[self._sources] != parts[self._targets]
        for ends in (self._sources, self._targets):
            chosen = crossing & (parts[ends] != _NOWHERE)
            rates = numpy.bincount(parts[ends[chosen]], self._rates[chosen], count)
            links = numpy.bincount(parts[ends[chosen]], self._shaped[chosen], count)
            yield from map(Cut, rates.tolist(), links.tolist())
            crossings = 2 * (count - 1)
            yield Cut(float(rates.sum()) / crossings, float(links.sum()) / crossings)

    def _nowhere(self) -> NDArray[numpy.int64]:
        return numpy.full(self._count, _NOWHERE, dtype=numpy.int64)
