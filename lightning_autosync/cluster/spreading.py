"""Trees that follow sketches and use alike ranks equally.

In a tree some ranks of a class have many neighbours, and the others are leaves. Several trees that take turns use all
ranks equally. Each unit (a node, or a rank whose node is not joined) has a quota of children over all trees. In each
tree the units with the largest quota left are the inner ones, and they take no more children than their quota allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy

from lightning_autosync.cluster.classes import RankClasses
from lightning_autosync.cluster.columns import Vector
from lightning_autosync.cluster.sketches import RANKS, WHOLE, Sketch
from lightning_autosync.cluster.trees import EdgeTree, tree_of

_LEAST_CHILDREN = 8
"""Children of an inner unit where its class needs no more; more would make shallower trees of more uneven work."""

Unit = tuple[int, ...]
"""The ranks of a node, or one rank."""


def spread_trees(classes: RankClasses, sketches: Sequence[tuple[Sketch, float]]) -> Iterator[EdgeTree]:
    """One tree for each pair of a sketch and the share of data on it; alike ranks and links are used equally.

    The use of a rank differs from the mean by about one edge of one tree.
    """
    spreader = _Spreader(classes, sketches)
    for sketch, weight in sketches:
        yield tree_of(spreader.edges(sketch, weight))


class _Quotas:
    """Children that equal units may still take, as sums of the weights of trees."""

    def __init__(self, units: int, total: float) -> None:
        self._left = numpy.full(units, total / units)

    def take(self, children: int, weight: float) -> list[tuple[int, int]]:
        """Choose units for ``children`` in a tree of this ``weight``: pairs of a unit and its number of children.

        Without children it is the unit with the largest quota left. The first one has the largest number.
        """
        order = numpy.argsort(-numpy.round(self._left / weight, 6), kind="stable")
        quota = float(self._left[order[0]]) / weight
        wide = max(_LEAST_CHILDREN, math.ceil(math.sqrt(children)))
        # A quota is used up in turns of equal size, so that no turn is left with a few children.
        widest = max(1, math.ceil(quota / max(1, math.ceil(quota / wide - 1e-6)) - 1e-6))
        taken: dict[int, int] = {}
        left, least = children, 0
        while left:
            for unit in order.tolist():
                allowed = math.ceil(self._left[unit] / weight - 1e-6)
                count = min(left, max(least, min(widest, allowed)))
                if count:
                    taken[unit] = taken.get(unit, 0) + count
                    self._left[unit] -= count * weight
                    left -= count
            least = 1  # where the quotas are used up, everyone takes one more in turn
        return sorted(taken.items(), key=lambda one: -one[1]) or [(int(order[0]), 0)]


class _Spreader:
    def __init__(self, classes: RankClasses, sketches: Sequence[tuple[Sketch, float]]) -> None:
        self._nodes: list[list[Unit]] = classes.nodes
        self._ranks: list[list[Unit]] = [[(rank,) for node in nodes for rank in node] for nodes in classes.nodes]
        self._uses = [0.0] * classes.link_graph.world_size
        node_totals, rank_totals = self._totals(sketches)
        self._of_nodes = [_Quotas(len(units), total) for units, total in zip(self._nodes, node_totals, strict=True)]
        self._of_ranks = [_Quotas(len(units), total) for units, total in zip(self._ranks, rank_totals, strict=True)]
        whole = sum(weight for _, weight in sketches)
        nodes = [node for nodes in self._nodes for node in nodes if len(node) > 1]
        self._inside = {node: _Quotas(len(node), whole * (len(node) - 1)) for node in nodes}

    def _totals(self, sketches: Sequence[tuple[Sketch, float]]) -> Vector:
        """[2, classes] weighted children over all trees that hang from nodes, and from ranks of nodes not joined."""
        totals = numpy.zeros((2, len(self._nodes)))
        for sketch, weight in sketches:
            for one, joined in enumerate(sketch.joined):
                totals[int(joined == RANKS), one] += weight * self._children(one, sketch)
        return totals

    def _children(self, one: int, sketch: Sketch) -> int:
        """Number of units that hang from units of the class: its own, and those of other classes."""
        own = len(self._nodes[one]) - 1 if sketch.joined[one] == WHOLE else 0
        return own + sum(joint.edges for joint in sketch.joints if joint.parent == one)

    def edges(self, sketch: Sketch, weight: float) -> list[tuple[int, int]]:
        """The edges of the next tree."""
        edges: list[tuple[int, int]] = []
        units, inner = [], []
        for one, joined in enumerate(sketch.joined):
            alone = joined == RANKS
            units.append((self._ranks if alone else self._nodes)[one])
            quotas = (self._of_ranks if alone else self._of_nodes)[one]
            inner.append(quotas.take(self._children(one, sketch), weight))
        entry = {unit: self._join_inside(unit, weight, edges) for units_of in units for unit in units_of}
        for one, chosen in enumerate(inner):
            hung = self._hung(one, sketch, units, inner)
            for place, child in zip(_slots(chosen), hung, strict=True):
                rank = min(units[one][place], key=self._uses.__getitem__)
                self._connect(rank, entry[child], weight, edges)
        return edges

    def _hung(
        self, one: int, sketch: Sketch, units: list[list[Unit]], inner: list[list[tuple[int, int]]]
    ) -> Iterator[Unit]:
        """The units that hang from units of the class, those with many below them first."""
        first, *others = [place for place, _ in inner[one]]
        if sketch.joined[one] == WHOLE:
            yield from (units[one][place] for place in others)
        joints = [joint for joint in sketch.joints if joint.parent == one]
        yield from (units[joint.child][inner[joint.child][0][0]] for joint in joints if joint.edges == 1)
        if sketch.joined[one] == WHOLE:
            above = {first, *others}
            yield from (unit for place, unit in enumerate(units[one]) if place not in above)
        for joint in joints:
            if joint.edges > 1:
                yield from units[joint.child]

    def _join_inside(self, unit: Unit, weight: float, edges: list[tuple[int, int]]) -> int:
        """Connect the devices of a node; returns the rank by which the node hangs from others."""
        if len(unit) == 1:
            return unit[0]
        chosen = self._inside[unit].take(len(unit) - 1, weight)
        above = [place for place, _ in chosen]
        below = [place for place in range(len(unit)) if place not in above]
        for place, child in zip(_slots(chosen), [*above[1:], *below], strict=True):
            self._connect(unit[place], unit[child], weight, edges)
        return unit[above[0]]

    def _connect(self, i: int, j: int, weight: float, edges: list[tuple[int, int]]) -> None:
        edges.append((i, j))
        self._uses[i] += weight
        self._uses[j] += weight


def _slots(chosen: list[tuple[int, int]]) -> Iterator[int]:
    """Each unit as often as it takes children, in order."""
    for place, count in chosen:
        yield from [place] * count
