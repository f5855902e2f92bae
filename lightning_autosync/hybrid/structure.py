"""The choices for a model: the signatures of its layers and the layouts of its values.

Operators that must be split alike, or that are in repeated blocks, share one choice.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import networkx

from lightning_autosync.hybrid.graph import INPUT, Edge, Graph, Operator

_NUMBER = re.compile(r"(?<![^.])\d+(?=[.#]|$)")
"""A part of a path that is the number of a block."""
_Key = tuple["int | None", "int | None", "int | None"]


@dataclass(frozen=True)
class LayoutFlow:
    """Values that layers of one choice hand to layers of another choice.

    Attributes:
        source: choice of the producing layers; None if the layout is a choice of its own (``value``).
        value: choice of the layout of the values; None if the layout belongs to this flow alone.
        target: choice of the consuming layers; None for the model's output.
        makers: the producing operators.
        edges: the edges, each with the index of the consuming operator.
    """

    source: int | None
    value: int | None
    target: int | None
    makers: tuple[int, ...]
    edges: tuple[tuple[int | None, Edge], ...]

    @property
    def units(self) -> int:
        """Number of equal pieces into which the features may be cut along all edges."""
        return math.gcd(*(edge.units for _, edge in self.edges))


@dataclass(frozen=True)
class Structure:
    """The choices of a model.

    Attributes:
        layers: for each choice of a signature, the operators that share it.
        values: for each choice of a layout, the operators and joins whose results share it.
        flows: flows between layers.
        layer_of: [operators] choice of the signature. A join of results that are split alike has the choice of its
            sources; other joins have None.
        value_of: [operators] choice of the result's layout; None if it is chosen with the flow to its only consumers.
        units: for each choice of a layout, the number of pieces into which the features may be cut.
    """

    graph: Graph
    layers: tuple[tuple[int, ...], ...]
    values: tuple[tuple[int, ...], ...]
    flows: tuple[LayoutFlow, ...]
    layer_of: tuple[int | None, ...]
    value_of: tuple[int | None, ...]
    units: tuple[int, ...]


def structure(graph: Graph, collapse: bool = True) -> Structure:
    """The choices of a model.

    Args:
        collapse: whether layers of repeated blocks share their choices.
    """
    return _Builder(graph, collapse).build()


class _Builder:
    def __init__(self, graph: Graph, collapse: bool) -> None:
        self._graph = graph
        self._operators = graph.operators
        self._alias = self._siblings()
        self._layer_of, self._layers = self._tied(collapse)

    def build(self) -> Structure:
        value_of, values = self._shared_values()
        return Structure(
            self._graph,
            tuple(map(tuple, self._layers)),
            values,
            tuple(self._flows(value_of)),
            tuple(self._layer_of),
            tuple(value_of),
            tuple(self._value_units(members) for members in values),
        )

    def _siblings(self) -> dict[int, int]:
        """Meetings whose sources are operators of one kind that feed nothing else, mapped to their first source.

        For example, queries, keys and values are split alike, so their join is not a choice of its own.
        """
        found: dict[int, int] = {}
        for index, operator in enumerate(self._operators):
            if not operator.is_join:
                continue
            sources = [edge.source for edge in operator.inputs]
            if INPUT in sources or index in self._graph.outputs:
                continue
            made_by = [self._operators[source] for source in sources]
            alone = all(len(self._takers(source)) == 1 and source not in self._graph.outputs for source in sources)
            alike = len({(made.kind, made.output.batch_axis, _takes(made)) for made in made_by}) == 1
            if alone and alike and all(not made.is_join and "col" in made.rules for made in made_by):
                found[index] = sources[0]
        return found

    def _takers(self, index: int) -> list[int]:
        return [taker for taker, _ in self._graph.consumers[index]]

    def _tied(self, collapse: bool) -> tuple[list[int | None], list[list[int]]]:
        """The choice of each operator, and the sets of operators that share one signature."""
        same = networkx.utils.UnionFind(range(len(self._operators)))
        calls: dict[Hashable, int] = {}
        for index, operator in enumerate(self._operators):
            if operator.module is not None:
                same.union(calls.setdefault(operator.module, index), index)
        for join, first in self._alias.items():
            same.union(first, *(edge.source for edge in self._operators[join].inputs))
        if collapse:
            for alike in self._repeated(lambda operator: not operator.is_join):
                same.union(*alike)
        return self._numbered(same, [index for index, operator in enumerate(self._operators) if not operator.is_join])

    def _numbered(
        self, same: networkx.utils.UnionFind, indices: Iterable[int]
    ) -> tuple[list[int | None], list[list[int]]]:
        """The number of each operator's set, and the sets; a join without a choice has that of its first source."""
        sets: dict[int, list[int]] = {}
        for index in indices:
            sets.setdefault(same[index], []).append(index)
        number_of: list[int | None] = [None] * len(self._operators)
        for number, members in enumerate(sets.values()):
            for member in members:
                number_of[member] = number
        for join, first in self._alias.items():
            number_of[join] = number_of[first]
        return number_of, list(sets.values())

    def _repeated(self, wanted: Callable[[Operator], bool]) -> Iterable[list[int]]:
        """Sets of operators at the same place of equal blocks.

        Sets in which one operator feeds another are left out: a stack of single layers has no blocks.
        """
        places: dict[Hashable, list[int]] = defaultdict(list)
        for index, operator in enumerate(self._operators):
            if wanted(operator) and _NUMBER.search(operator.name):
                places[_place(operator)].append(index)
        for members in places.values():
            inside = set(members)
            stacked = any(
                self._origin(edge.source) in inside for member in members for edge in self._operators[member].inputs
            )
            if len(members) > 1 and not stacked:
                yield members

    def _origin(self, source: int) -> int:
        return self._alias.get(source, source)

    def _shared_values(self) -> tuple[list[int | None], tuple[tuple[int, ...], ...]]:
        """The layout choice of each operator, and the sets of operators and joins that share one."""
        same = networkx.utils.UnionFind()
        for index, operator in enumerate(self._operators):
            if operator.is_join and index not in self._alias:
                same.union(index, *(self._origin(edge.source) for edge in operator.inputs if edge.source != INPUT))
        for index in range(len(self._operators)):
            if index in self._alias or self._feeds_one_layer(index):
                continue
            same.union(index)
        for members in self._layers:
            # Layers that share a signature hand on their results in the same layout.
            shared = [member for member in members if member in same.parents]
            if shared:
                same.union(*members)
        for alike in self._repeated(lambda operator: operator.is_join):
            shared = [member for member in alike if member in same.parents]
            if len(shared) == len(alike):
                same.union(*alike)
        value_of, values = self._numbered(same, sorted(same.parents))
        return value_of, tuple(map(tuple, values))

    def _feeds_one_layer(self, index: int) -> bool:
        """Whether a result has consumers of only one choice, or is only the model's output."""
        takers: Counter[int | None] = Counter(self._layer_of[taker] for taker in self._after(index))
        if index in self._graph.outputs:
            return not takers
        return len(takers) == 1 and not self._operators[index].is_join

    def _after(self, index: int) -> list[int]:
        """The consumers of an operator's result; joins without a choice are replaced by their own consumers."""
        found = []
        for taker in self._takers(index):
            found += self._after(taker) if taker in self._alias else [taker]
        return found

    def _flows(self, value_of: list[int | None]) -> Iterable[LayoutFlow]:
        edges: dict[_Key, list[tuple[int | None, Edge]]] = defaultdict(list)
        for index, operator in enumerate(self._operators):
            for edge in () if operator.is_join else operator.inputs:
                if edge.source != INPUT:
                    edges[self._key(edge.source, self._layer_of[index], value_of)].append((index, edge))
        for index in self._graph.outputs:
            edges[self._key(index, None, value_of)].append((None, Edge(index, self._operators[index].output)))
        for (source, value, target), carried in edges.items():
            makers = {maker: None for _, edge in carried for maker in self._makers(edge.source)}
            yield LayoutFlow(source, value, target, tuple(makers), tuple(carried))

    def _key(self, source: int, target: int | None, value_of: list[int | None]) -> _Key:
        value = value_of[source]
        return self._layer_of[source] if value is None else None, value, target

    def _makers(self, source: int) -> list[int]:
        """The operators whose results make up a value; for a join without its own choice all its sources."""
        if source in self._alias:
            return [maker for edge in self._operators[source].inputs for maker in self._makers(edge.source)]
        return [source]

    def _value_units(self, members: tuple[int, ...]) -> int:
        """Number of pieces into which features may be cut in all of these results and inputs of joins."""
        units = 0
        for member in members:
            operator = self._operators[member]
            units = math.gcd(units, operator.units)
            if operator.is_join:
                units = math.gcd(units, *(edge.units for edge in operator.inputs))
        return units


def _takes(operator: Operator) -> tuple[int, ...]:
    return tuple(edge.source for edge in operator.inputs)


def _place(operator: Operator) -> Hashable:
    """A key that is equal for operators at the same place of equal blocks."""
    weights = tuple((weight.name, weight.shape, weight.trainable) for weight in operator.weights)
    shapes = tuple((edge.value, edge.units) for edge in operator.inputs)
    return (
        _NUMBER.sub("*", operator.name),
        operator.kind,
        weights,
        shapes,
        operator.output,
        operator.units,
        operator.parts,
    )
