"""Layouts of values over a mesh, and the moves between layouts.

Along one dimension of the mesh a value is in one of five states. The gradient of a value has a layout too:

| state | value | gradient |
|---|---|---|
| ``batch`` | each rank has its own samples | of the rank's own loss |
| ``features`` | each rank has some features of all samples | the same features, of the mean loss |
| ``full`` | each rank has all of it | all of it on each rank, of the mean loss |
| ``copy`` | each rank has all of it | each rank has a summand, of the mean loss |
| ``partial`` | each rank has a summand | all of it on each rank, of the mean loss |

The mean is over the ranks along the dimension. Inputs of layers are ``batch``, ``features``, ``full`` or ``copy``;
outputs are ``batch``, ``features``, ``full`` or ``partial``. Values between layers are never ``copy`` or ``partial``.

A value without samples (``rows`` is None), such as a table of positions, is the same on every rank in the states
``batch``, ``full`` and ``copy``, which then differ only in their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple

State = Literal["batch", "features", "full", "copy", "partial"]


@dataclass(frozen=True)
class Layout:
    """The layout of a value over the mesh.

    Attributes:
        states: [dimensions] state along each dimension of the mesh.
        rows: axis of the samples; None if there is none.
        features: axis along which ``features`` cuts; meaningless if no state is ``features``.
        parts: number of results that follow each other along that axis, each of which is cut by itself.
    """

    states: tuple[State, ...]
    rows: int | None = 0
    features: int = 0
    parts: int = 1

    @property
    def home(self) -> bool:
        """Whether each rank has its own samples as a whole, as code outside of layers sees them."""
        return all(state == "batch" for state in self.states)

    @property
    def by_features(self) -> tuple[int, ...]:
        """The dimensions of the mesh along which features are cut."""
        return tuple(k for k, state in enumerate(self.states) if state == "features")

    def with_states(self, states: Sequence[State]) -> Layout:
        return replace(self, states=tuple(states))


class Place(NamedTuple):
    """The position of the ranks' blocks in a local tensor, for one dimension of the mesh.

    The axis consists, from the slowest to the fastest index, of ``outer`` blocks x ranks x the rest.
    """

    axis: int
    outer: int


class Move(NamedTuple):
    """One step of a change of layout, along one dimension of the mesh.

    Attributes:
        kind: operation on the value.
        back: operation on the gradient.
        take: position of the blocks that are cut or summed.
        put: position at which received blocks are put.
        scale: scale of the gradient, for the step from a rank's own loss to the mean loss or back.
    """

    kind: Operation
    back: Operation
    dimension: int
    take: Place | None
    put: Place | None
    scale: Literal["one", "times", "divide"]


Operation = Literal["keep", "cut", "pad", "gather", "scatter", "sum", "exchange"]
"""Operation along one dimension of the mesh: ``cut`` keeps a rank's own block, ``pad`` fills the others' blocks with
zeros, ``gather`` is an all-gather of the blocks, ``scatter`` a reduce-scatter, ``sum`` an all-reduce, and ``exchange``
an all-to-all, which cuts at one position and gathers at another."""

_ROWS: dict[tuple[State, State], tuple[Operation, Operation, str, str, str]] = {
    # (from, to): operation on the value, on the gradient, position to take, position to put, scale of the gradient
    ("batch", "full"): ("gather", "cut", "", "rows", "times"),
    ("batch", "copy"): ("gather", "scatter", "", "rows", "times"),
    ("batch", "features"): ("exchange", "exchange", "features", "rows", "times"),
    ("full", "batch"): ("cut", "gather", "rows", "", "divide"),
    ("features", "batch"): ("exchange", "exchange", "rows", "features", "divide"),
    ("partial", "batch"): ("scatter", "gather", "rows", "", "divide"),
}
_NO_ROWS: dict[tuple[State, State], tuple[Operation, Operation, str, str, str]] = {
    ("batch", "full"): ("keep", "keep", "", "", "one"),
    ("batch", "copy"): ("keep", "keep", "", "", "times"),
    ("batch", "features"): ("cut", "pad", "features", "", "times"),
    ("full", "batch"): ("keep", "sum", "", "", "divide"),
    ("features", "batch"): ("gather", "scatter", "", "features", "divide"),
    ("partial", "batch"): ("sum", "sum", "", "", "divide"),
}
_FEATURES: dict[tuple[State, State], tuple[Operation, Operation, str, str, str]] = {
    ("full", "features"): ("cut", "gather", "features", "", "one"),
    ("full", "copy"): ("keep", "sum", "", "", "one"),
    ("features", "full"): ("gather", "cut", "", "features", "one"),
    ("features", "copy"): ("gather", "scatter", "", "features", "one"),
    ("partial", "full"): ("sum", "keep", "", "", "one"),
    ("partial", "features"): ("scatter", "gather", "features", "", "one"),
}


@lru_cache(maxsize=4096)
def moves(source: Layout, states: tuple[State, ...], sizes: tuple[int, ...]) -> tuple[Move, ...]:
    """The moves that bring a value from one layout into other states.

    To keep traffic low, moves that shrink the value come first, then moves that sum it, then moves that enlarge it.
    Gathers start with the first dimension and scatters with the last one, so that the first dimensions, which use the
    slowest links, carry the smallest values.

    Args:
        states: new states; axes and parts stay.
    """
    return _Mover(source, states, sizes).moves()


class _Mover:
    """Computes `moves`; keeps track of the states after each one."""

    def __init__(self, source: Layout, states: tuple[State, ...], sizes: tuple[int, ...]) -> None:
        self._layout = source
        self._goal = states
        self._sizes = sizes
        self._now: list[State] = list(source.states)
        self._moves: list[Move] = []
        self._after = tuple(k for k, state in enumerate(states) if state == "features")
        self._nested = source.by_features

    def moves(self) -> tuple[Move, ...]:
        self._undo_inner_cuts()
        dimensions = range(len(self._sizes))
        for k in dimensions:
            self._step(k, "full", ("batch", "features"))
        for k in reversed(dimensions):
            self._step(k, "partial", ("batch", "features"))
        for k in dimensions:
            self._step(k, "batch", ("features",))
        for k in reversed(dimensions):
            self._step(k, "features", ("batch",))
        for k in reversed(dimensions):
            self._step(k, "partial", ("full", "copy"))
            self._step(k, "full", ("copy",))
        for k in dimensions:
            self._step(k, "batch", ("full", "copy"))
            self._step(k, "features", ("full", "copy"))
        assert tuple(self._now) == self._goal, f"cannot convert {self._layout.states} to {self._goal}"
        return tuple(self._moves)

    def _undo_inner_cuts(self) -> None:
        """Gather features along dimensions whose cut is nested inside of a cut that changes.

        Features are cut by the first dimension, and then each block by the next one. So an inner cut cannot stay when
        an outer one changes.
        """
        before, after = self._nested, self._after
        common = 0
        while common < min(len(before), len(after)) and before[common] == after[common]:
            common += 1
        if common < min(len(before), len(after)):
            for k in before[common:]:
                self._move(k, "full")
            self._nested = after
        else:
            self._nested = max(before, after, key=len)

    def _step(self, dimension: int, source: State, goals: tuple[State, ...]) -> None:
        if self._now[dimension] == source and self._goal[dimension] in goals:
            goal = self._goal[dimension]
            self._move(dimension, "full" if (source, goal) == ("partial", "copy") else goal)

    def _move(self, dimension: int, goal: State) -> None:
        pair = self._now[dimension], goal
        table = _FEATURES if pair in _FEATURES else _NO_ROWS if self._layout.rows is None else _ROWS
        kind, back, take, put, scale = table[pair]
        self._moves.append(
            Move(kind, back, dimension, self._place(take, dimension), self._place(put, dimension), scale)  # type: ignore[arg-type]
        )
        self._now[dimension] = goal

    def _place(self, which: str, dimension: int) -> Place | None:
        if not which:
            return None
        if which == "rows":
            assert self._layout.rows is not None
            outer = prod(self._sizes[k] for k in range(dimension) if self._now[k] != "batch")
            return Place(self._layout.rows, outer)
        inside = (k for k in self._nested if k < dimension and self._now[k] != "features")
        return Place(self._layout.features, self._layout.parts * prod(self._sizes[k] for k in inside))


def local_shape(home: Sequence[int], layout: Layout, sizes: Sequence[int]) -> tuple[int, ...]:
    """The shape of a rank's tensor in a layout; ``home`` is the shape of the value for a rank's own samples."""
    shape = list(home)
    if layout.rows is not None:
        shape[layout.rows] *= prod(size for state, size in zip(layout.states, sizes, strict=True) if state != "batch")
    for k in layout.by_features:
        shape[layout.features] //= sizes[k]
    return tuple(shape)


def home_shape(local: Sequence[int], layout: Layout, sizes: Sequence[int]) -> tuple[int, ...]:
    """The inverse of `local_shape`."""
    shape = list(local)
    if layout.rows is not None:
        shape[layout.rows] //= prod(size for state, size in zip(layout.states, sizes, strict=True) if state != "batch")
    for k in layout.by_features:
        shape[layout.features] *= sizes[k]
    return tuple(shape)
