"""Exact search: dynamic programming that eliminates one choice after another.

On a chain of layers this is Viterbi's algorithm. It needs additive costs, so it ignores the overlap of gradients with
the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import networkx
import numpy
from numpy.typing import NDArray

from lightning_autosync.errors import PlanError
from lightning_autosync.hybrid.cost import step_seconds
from lightning_autosync.hybrid.tables import Tables

MOST_ENTRIES = 2**24
"""Largest number of entries of an intermediate table."""


@dataclass
class _Table:
    """Joint costs of some choices: an array with one axis of alternatives per choice."""

    choices: tuple[int, ...]
    costs: NDArray[numpy.float64]


def exact(tables: Tables) -> tuple[tuple[int, ...], float]:
    """The optimal alternatives for a step without overlap, and its seconds.

    Raises:
        PlanError: the choices depend on each other so much that an intermediate table is too large.
    """
    factors = [_Table((number,), step_seconds(costs, overlap=False)) for number, costs in enumerate(tables.alone)]
    factors += [_Table(pair, step_seconds(costs, overlap=False)) for pair, costs in tables.pairs.items()]
    decisions: list[tuple[int, tuple[int, ...], NDArray[numpy.int64]]] = []
    for number in _order(len(tables.alone), list(tables.pairs)):
        together = [factor for factor in factors if number in factor.choices]
        factors = [factor for factor in factors if number not in factor.choices]
        joined = _joined(together, number)
        decisions.append((number, joined.choices[1:], joined.costs.argmin(axis=0)))
        factors.append(_Table(joined.choices[1:], joined.costs.min(axis=0)))
    choice = [0] * len(tables.alone)
    for number, others, best in reversed(decisions):
        choice[number] = int(best[tuple(choice[other] for other in others)])
    return tuple(choice), float(sum(factor.costs for factor in factors))


def _order(count: int, pairs: Sequence[tuple[int, int]]) -> list[int]:
    """The order of elimination: always a choice with the fewest neighbours, which keeps the tables small."""
    graph = networkx.Graph(pairs)
    graph.add_nodes_from(range(count))
    order = []
    while graph:
        number = min(graph, key=lambda node: (graph.degree[node], node))
        around = list(graph[number])
        graph.remove_node(number)
        graph.add_edges_from((one, other) for place, one in enumerate(around) for other in around[:place])
        order.append(number)
    return order


def _joined(together: Sequence[_Table], number: int) -> _Table:
    """The sum of some tables, with the axis of one choice first.

    Raises:
        PlanError: the sum has too many entries.
    """
    others = sorted({choice for factor in together for choice in factor.choices} - {number})
    choices = (number, *others)
    sizes = {
        choice: size for factor in together for choice, size in zip(factor.choices, factor.costs.shape, strict=True)
    }
    entries = math.prod(sizes[choice] for choice in choices)
    if entries > MOST_ENTRIES:
        raise PlanError(f"exact search: it needs a table of {entries} entries; allowed: at most {MOST_ENTRIES}")
    total = numpy.zeros([sizes[choice] for choice in choices])
    for factor in together:
        places = [choices.index(choice) for choice in factor.choices]
        order = numpy.argsort(places)
        shape = [sizes[choice] if choice in factor.choices else 1 for choice in choices]
        total = total + factor.costs.transpose(order).reshape(shape)
    return _Table(choices, total)
