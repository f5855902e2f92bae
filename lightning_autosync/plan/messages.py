"""Sizes of messages: how they are cut into shards, and what compressors make of them; shared by engine and replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, prod

from lightning_autosync.plan.spec import Compressor, Partition

ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes an element, for the gradient types that can travel."""

COUNT_BYTES = 4
"""Bytes of one gradient count behind an encoded message."""


def kept_elements(compressor: Compressor, numel: int) -> int:
    """Elements that ``topk`` keeps of ``numel``."""
    return min(numel, ceil(compressor.ratio * numel))


def encoded_bytes(compressor: Compressor, numel: int, tail: int, itemsize: int) -> int:
    """Bytes on the wire of ``numel`` elements, the last ``tail`` of which are counts and travel as they are."""
    body = numel - tail
    if compressor.kind in ("fp16", "bf16"):
        return 2 * numel
    if compressor.kind == "int8":
        return body + 4 * ceil(body / compressor.block) + COUNT_BYTES * tail
    if compressor.kind == "topk":
        return 8 * kept_elements(compressor, body) + COUNT_BYTES * tail
    return itemsize * numel


@dataclass(frozen=True)
class Factor:
    """Where a variable's low-rank factors lie in the two rounds of PowerSGD.

    A variable seen as a matrix ``[rows, columns]`` sends P ``[rows, rank]`` in the first round and Q
    ``[columns, rank]`` in the second; one that would not shrink (``rank`` 0) travels whole in the first.
    """

    shape: tuple[int, ...]
    rank: int
    first: int
    second: int

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def columns(self) -> int:
        return prod(self.shape[1:])

    @property
    def first_numel(self) -> int:
        return self.rows * self.rank if self.rank else prod(self.shape)

    @property
    def second_numel(self) -> int:
        return self.columns * self.rank


def low_rank_layout(shapes: Sequence[tuple[int, ...]], rank: int) -> tuple[list[Factor], tuple[int, int]]:
    """The factors of each variable and the elements of both rounds (PowerSGD, Vogels et al. 2019, algorithm 1)."""
    factors: list[Factor] = []
    lengths = [0, 0]
    for shape in shapes:
        rows, columns = (shape[0], prod(shape[1:])) if shape else (1, 1)
        fitting = min(rank, rows, columns)
        shrinks = len(shape) > 1 and (rows + columns) * fitting < rows * columns
        factor = Factor(shape, fitting if shrinks else 0, lengths[0], lengths[1])
        factors.append(factor)
        lengths[0] += factor.first_numel
        lengths[1] += factor.second_numel
    return factors, (lengths[0], lengths[1])


def even_bounds(start: int, stop: int, pieces: int) -> tuple[int, ...]:
    """Bounds of pieces that differ by one element at most, the longer ones first."""
    size, longer = divmod(stop - start, pieces)
    return tuple(start + piece * size + min(piece, longer) for piece in range(pieces + 1))


def weighted_bounds(length: int, pieces: int, weights: Sequence[float] | None) -> tuple[int, ...]:
    """Bounds of pieces of ``[0, length)`` in proportion to ``weights``, each off by less than one element."""
    if weights is None:
        return even_bounds(0, length, pieces)
    total = sum(weights)
    return (0, *(round(length * reached / total) for reached in accumulate(weights)))


def cut(partition: Partition | None, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Bounds, in elements, of the shards of a message of variables with these shapes.

    With an axis, the lone variable is cut between slices along it, else the message between any two elements.

    Raises:
        ValueError: the axis does not exist, or has fewer slices than shards.
    """
    numel = sum(prod(shape) for shape in shapes)
    if partition is None:
        return (0, numel)
    slices, unit = numel, 1
    if partition.axis is not None:
        shape = shapes[0] or (1,)
        if partition.axis >= len(shape):
            raise ValueError(
                f"partition.axis: axis {partition.axis} is too large; the variable has shape {list(shape)}"
            )
        slices = shape[partition.axis]
        unit = numel // slices if slices else 0
    if partition.shards > slices:
        pieces = "elements" if partition.axis is None else f"slices along axis {partition.axis}"
        raise ValueError(f"partition.shards: {partition.shards} shards, but only {slices} {pieces}")
    return tuple(unit * bound for bound in weighted_bounds(slices, partition.shards, partition.weights))
