"""Tree packing by classes of ranks: the linear program does not grow with the ranks of a class.

Let the automorphisms of the cluster exchange alike nodes and the devices of a node (`RankClasses`). The average of a
packing over all of them has the same rate, still respects the capacities, and loads alike channels equally. So it is
enough to ask that all channels of an orbit together are not overloaded, and only the number of edges of each kind in a
tree matters. A *sketch* says these numbers. The dual prices of this program are equal on an orbit; every tree costs at
least 1 under them, because it costs what its sketch costs. So they bound the full program as its own prices do.

The cheapest tree follows from Kruskal's algorithm on whole classes: edges of one kind cost the same, and adding all of
them joins classes at once. Let whole(a) be the cost of the dearest edges that join all ranks of class a. Then
cost(a, b) >= min(whole(a), whole(b)) under any prices. For the route of an edge between nodes of a and b is the way out
of both nodes to the places at which the links of the classes end, and the route between these places. An edge inside a
class uses the way out of two of its nodes only. So of two classes, the one whose nodes are cheaper to leave is joined
before an edge between both is as cheap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy
from scipy.sparse import csc_array

from lightning_autosync.cluster.classes import RankClasses, rank_classes
from lightning_autosync.cluster.columns import Packing, Vector, both_ways, generate_columns, without_traces
from lightning_autosync.cluster.link_graph import LinkGraph

RANKS, NODES, WHOLE = range(3)
"""What of a class is joined inside of it: nothing, the ranks of each node, or all of it."""

_EQUAL_COSTS = 1e-9
"""Costs that differ by less, relative to the largest, count as equal."""


class Joint(NamedTuple):
    """Edges between two classes: each unit of ``child`` hangs from a rank of ``parent``.

    Attributes:
        parent, child: the classes.
        edges: number of edges; 1 also if the child's ranks are connected otherwise.
    """

    parent: int
    child: int
    edges: int


class Sketch(NamedTuple):
    """The numbers of edges of each kind in a spanning tree.

    Attributes:
        joined: [classes] `RANKS`, `NODES` or `WHOLE`.
        joints: edges between classes.
    """

    joined: tuple[int, ...]
    joints: tuple[Joint, ...]


def sketch_packing(classes: RankClasses) -> Packing[Sketch]:
    """The best packing of trees used in both directions; loads, capacities and prices are those of orbits.

    ``prices`` has the price of a load on any one channel of the orbit.
    """
    rows = classes.rows

    def load(sketches: Sequence[Sketch]) -> csc_array:
        counts = numpy.array([edge_counts(sketch, classes) for sketch in sketches]).reshape(-1, len(rows))
        return csc_array((counts @ rows).T)

    def price(duals: Vector) -> Iterator[Sketch]:
        costs = rows @ duals
        return (least_sketch(costs, hub, classes) for hub in range(len(classes)))

    seeds = [least_sketch(numpy.ones(len(rows)), hub, classes) for hub in range(len(classes))]
    return generate_columns(classes.capacities, seeds, load, price)


def class_prices(link_graph: LinkGraph) -> Vector | None:
    """Prices [channels] that bound the rate of sums along trees: all capacities cost that rate, and trees reach it.

    None where this program does not prove a bound: the ranks do not fall into classes, a link is asymmetric (so that
    pairs of different trees may be faster), or some ranks have several routes between them.
    """
    classes = rank_classes(link_graph) if link_graph.symmetric and link_graph.single_routes else None
    if classes is None:
        return None
    prices = without_traces(sketch_packing(classes).prices, classes.capacities)
    # A tree may still cost less than 1 by the tolerance of the generation, but a bound has to hold for it too.
    costs = classes.rows @ prices
    cheapest = (least_sketch(costs, hub, classes) for hub in range(len(classes)))
    least = min(float(edge_counts(sketch, classes) @ costs) for sketch in cheapest)
    of_channels: Vector = prices[classes.orbit] / min(least, 1.0)
    return both_ways(of_channels)


def edge_counts(sketch: Sketch, classes: RankClasses) -> Vector:
    """[kinds] number of edges of each kind."""
    counts = numpy.zeros(len(classes.rows))
    size = len(classes)
    for one, (nodes, joined) in enumerate(zip(classes.nodes, sketch.joined, strict=True)):
        counts[one] = len(nodes) * (len(nodes[0]) - 1) * (joined >= NODES)
        counts[size + one] = (len(nodes) - 1) * (joined == WHOLE)
    kind = {pair: number for number, pair in enumerate(classes.pairs, 2 * size)}
    for parent, child, count in sketch.joints:
        counts[kind[min(parent, child), max(parent, child)]] = count
    return counts


def least_sketch(costs: Vector, hub: int, classes: RankClasses) -> Sketch:
    """The sketch of a spanning tree of least cost; of equal costs, edges at the class ``hub`` come first.

    Args:
        costs: [kinds] cost of an edge of each kind.
        hub: the class to which others are joined if that costs no more.
        classes: the classes.
    """
    size = len(classes)
    several = numpy.array([[len(nodes[0]) > 1 for nodes in classes.nodes], [len(nodes) > 1 for nodes in classes.nodes]])
    outer = costs[size : 2 * size]
    # Rounding must not reverse what holds for exact costs: an inner edge costs no more than an outer one.
    inner = numpy.where(several[1], numpy.minimum(costs[:size], outer), costs[:size])
    whole = numpy.where(several[1], outer, numpy.where(several[0], inner, 0.0))
    unit = max(float(costs.max()) * _EQUAL_COSTS, 1e-300)
    events = [(round(float(inner[one]) / unit), 0, one, one) for one in range(size) if several[0, one]]
    events += [(round(float(outer[one]) / unit), 1, one, one) for one in range(size) if several[1, one]]
    for cost, (a, b) in zip(costs[2 * size :], classes.pairs, strict=True):
        least = max(float(cost), min(whole[a], whole[b]))
        events.append((round(least / unit), 2 if hub in (a, b) else 3, a, b))
    joining = _Joining(classes, hub)
    for _, step, a, b in sorted(events):
        joining.join_inside(a, NODES + step) if step < 2 else joining.join(a, b)
    return joining.sketch()


class _Joining:
    """Classes that are joined step by step, the cheapest kind of edge first."""

    def __init__(self, classes: RankClasses, hub: int) -> None:
        self._nodes = classes.nodes
        self._hub = hub
        self._joined = [NODES if len(nodes[0]) == 1 else RANKS for nodes in classes.nodes]
        self._group = list(range(len(classes)))
        self._joints: list[Joint] = []
        for one in range(len(classes)):
            self._join_only_node(one)

    def join_inside(self, one: int, joined: int) -> None:
        """Join the ranks of each node, or all nodes of the class, unless edges to another class connect them."""
        if not self._connected(one):
            self._joined[one] = joined
            self._join_only_node(one)

    def join(self, a: int, b: int) -> None:
        """Join two classes, of which at least one is connected, unless they are connected already."""
        if self._group[a] == self._group[b]:
            return
        if self._connected(a) and self._connected(b):
            parent, child, count = (b, a, 1) if b == self._hub else (a, b, 1)
        else:
            parent, child = (a, b) if self._connected(a) else (b, a)
            count = sum(map(len, self._nodes[child])) if self._joined[child] == RANKS else len(self._nodes[child])
        self._joints.append(Joint(parent, child, count))
        old, new = self._group[b], self._group[a]
        self._group = [new if group == old else group for group in self._group]

    def sketch(self) -> Sketch:
        return Sketch(tuple(self._joined), tuple(sorted(self._joints)))

    def _join_only_node(self, one: int) -> None:
        if self._joined[one] == NODES and len(self._nodes[one]) == 1:
            self._joined[one] = WHOLE

    def _connected(self, one: int) -> bool:
        return self._joined[one] == WHOLE or self._group.count(self._group[one]) > 1
