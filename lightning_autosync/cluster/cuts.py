"""Cuts: channels that all data must cross, which bound how fast a cluster can synchronize.

After synchronizing a size, every rank has the sum of all ranks' data of that many bytes. Let the ranks be divided into
``k`` parts. A byte is summed along a tree of ranks and copied along another (switches do not sum), so the reduce and
the broadcast each take at least ``k - 1`` transfers between parts. So the channels out of all parts together carry at
least ``2 (k - 1)`` times the size, and so do the channels into all parts. The size also leaves and enters each part at
least once. This holds for all routes.

A cut gives each channel a price, such that synchronizing one byte costs at least 1 over any routes. In a time the
channels can carry no more than their capacities, so these, priced, bound the rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

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
        channels: indices of the priced channels in :class:`LinkGraph`; read-only.
        prices: price of a byte on each of ``channels``; their capacities cost ``rate``; read-only.
    """

    rate: float
    links: float
    channels: NDArray[numpy.int64] = field(compare=False, repr=False)
    prices: NDArray[numpy.float64] = field(compare=False, repr=False)

    def __post_init__(self) -> None:
        # Bounds are cached, and a caller must not change them for the next one.
        self.channels.setflags(write=False)
        self.prices.setflags(write=False)

    @classmethod
    def priced(cls, link_graph: LinkGraph, channels: NDArray[numpy.int64], prices: NDArray[numpy.float64]) -> Cut:
        """The cut with these prices; ``channels`` and ``prices`` as in the attributes."""
        rate, links = link_graph.capacities[channels] @ prices, link_graph.shaped[channels] @ prices
        return cls(float(rate), float(links), channels, prices)

    def seconds(self, size: float, burst: float = 0.0) -> float:
        """Lower bound in seconds for ``size`` bytes, if each idle link passes ``burst`` bytes at once."""
        return max(0.0, size - self.links * burst) / self.rate


def one_switch_cuts(bandwidths: Sequence[float], channels: Sequence[int]) -> list[Cut]:
    """Cuts for two or more ranks, each with its own link to one switch; together they are exact.

    Args:
        bandwidths: [ranks] bytes/s of each rank's link, in both directions.
        channels: [ranks] index of the channel from each rank to the switch.
    """
    count, slowest = len(bandwidths), int(numpy.argmin(bandwidths))
    crossings = 2 * (count - 1)
    # Both directions bind alike, so each gets half of the price, as in `both_ways`.
    ways = numpy.array([(channel, channel ^ 1) for channel in channels])
    one = Cut(bandwidths[slowest], 1.0, ways[slowest], numpy.full(2, 0.5))
    every = Cut(
        sum(bandwidths) / crossings, count / crossings, ways.reshape(-1), numpy.full(2 * count, 0.5 / crossings)
    )
    return undominated([one, every])


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
        index = link_graph.places
        self._count = len(index)
        self._sources, self._targets = link_graph.arcs
        self._link_graph = link_graph
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
            chosen = numpy.flatnonzero(crossing & (parts[ends] != _NOWHERE))
            by_part = chosen[numpy.argsort(parts[ends[chosen]], kind="stable")]
            sizes = numpy.bincount(parts[ends[chosen]], minlength=count)
            for channels in numpy.split(by_part, numpy.cumsum(sizes)[:-1]):
                yield self._equally_priced(channels, 1.0)
            yield self._equally_priced(by_part, 1.0 / (2 * (count - 1)))

    def _equally_priced(self, channels: NDArray[numpy.int64], price: float) -> Cut:
        return Cut.priced(self._link_graph, channels, numpy.full(len(channels), price))

    def _nowhere(self) -> NDArray[numpy.int64]:
        return numpy.full(self._count, _NOWHERE, dtype=numpy.int64)
