"""The traffic of changes of layout: the moves that the execution makes, for all pairs of states at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Literal

import numpy
from numpy.typing import NDArray

from lightning_autosync.hybrid.execution.layouts import Layout as Placement
from lightning_autosync.hybrid.execution.layouts import State, moves

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
_COLLECTIVE_OF: dict[str, Collective] = {
    "gather": "all_gather",
    "scatter": "reduce_scatter",
    "sum": "all_reduce",
    "exchange": "all_to_all",
}
"""The collective of each operation in `execution.layouts` that has one."""
COLLECTIVES = tuple(_COLLECTIVE_OF.values())

HANDED: tuple[State, ...] = ("batch", "features", "full")
"""States of values between layers."""
TAKEN: tuple[State, ...] = ("batch", "features", "full", "copy")
"""States in which layers take their inputs."""
MADE: tuple[State, ...] = ("batch", "features", "full", "partial")
"""States in which layers make their outputs."""

States = tuple[State, ...]


def home_states(dimensions: int) -> States:
    """The states of the model's input and output: cut by samples along all dimensions of the mesh."""
    batch: State = "batch"
    return (batch,) * dimensions


def all_states(kinds: Sequence[State], dimensions: int) -> tuple[States, ...]:
    """All combinations of one state per dimension of the mesh."""
    return tuple(product(kinds, repeat=dimensions))


@dataclass(frozen=True)
class ConversionTraffic:
    """Traffic of the changes between all pairs of states, per byte that the value has on a rank under data parallelism.

    Attributes:
        forward: [from, to, dimension, collective] bytes of the value that each rank sends.
        backward: [from, to, dimension, collective] bytes of its gradient that each rank sends.
        calls_forward, calls_backward: [from, to, dimension, collective] numbers of collectives.
    """

    forward: NDArray[numpy.float64]
    backward: NDArray[numpy.float64]
    calls_forward: NDArray[numpy.float64]
    calls_backward: NDArray[numpy.float64]


@cache
def traffic(
    mesh: tuple[int, ...], sources: tuple[States, ...], goals: tuple[States, ...], has_samples: bool
) -> ConversionTraffic:
    """The traffic of changes of layout.

    Args:
        mesh: sizes of the dimensions.
        sources, goals: states before and after the change.
        has_samples: whether the values have an axis of samples.
    """
    shape = (len(sources), len(goals), len(mesh), len(COLLECTIVES))
    found = [numpy.zeros(shape) for _ in range(4)]
    for i, source in enumerate(sources):
        for j, goal in enumerate(goals):
            size = local_size(source, mesh, has_samples)
            for kind, back, dimension in _program(source, goal, has_samples):
                ranks = mesh[dimension]
                before, size = size, size * _growth(kind, ranks)
                for which, (operation, payload) in enumerate(((kind, before), (back, size))):
                    collective = _COLLECTIVE_OF.get(operation)
                    if collective is not None:
                        place = i, j, dimension, COLLECTIVES.index(collective)
                        found[which][place] += payload * sent(collective, ranks)
                        found[which + 2][place] += 1
    return ConversionTraffic(*found)


def local_size(states: States, mesh: Sequence[int], has_samples: bool) -> float:
    """Bytes on one rank in these states, relative to data parallelism."""
    size = 1.0
    for state, ranks in zip(states, mesh, strict=True):
        if state != "batch" and has_samples:
            size *= ranks
        if state == "features":
            size /= ranks
    return size


def sent(kind: Collective, ranks: int) -> float:
    """Bytes that a rank sends in a collective per byte that it contributes, with a bandwidth-optimal algorithm."""
    if kind == "all_gather":
        return ranks - 1.0
    return (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)


def _growth(kind: str, ranks: int) -> float:
    """Factor by which a move enlarges a rank's part."""
    return {"gather": ranks, "pad": ranks, "cut": 1 / ranks, "scatter": 1 / ranks}.get(kind, 1.0)


@cache
def _program(source: States, goal: States, has_samples: bool) -> tuple[tuple[str, str, int], ...]:
    """The moves from one layout to another: operation on the value, operation on its gradient, and dimension."""
    # The moves do not depend on the sizes of the dimensions, so any size does.
    layout = Placement(source, 0 if has_samples else None, 1)
    return tuple((move.kind, move.back, move.dimension) for move in moves(layout, goal, (2,) * len(source)))
