"""Sizes of messages: bytes per element and bounds of shards, shared by engine and replay."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

from lightning_autosync.plan.spec import Partition

ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes per element, for the supported element types of gradients."""


def even_bounds(start: int, stop: int, pieces: int) -> tuple[int, ...]:
    """Bounds of pieces that differ by at most one element, the longer ones first."""
    size, longer = divmod(stop - start, pieces)
    return tuple(start + piece * size + min(piece, longer) for piece in range(pieces + 1))


def weighted_bounds(length: int, pieces: int, weights: Sequence[float] | None) -> tuple[int, ...]:
    """Bounds of pieces of ``[0, length)`` in proportion to ``weights``, rounded to whole elements."""
    if weights is None:
        return even_bounds(0, length, pieces)
    total = sum(weights)
    return (0, *(round(length * reached / total) for reached in accumulate(weights)))


def cut(partition: Partition | None, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Bounds in elements of the shards of a message whose variables have these shapes.

    With an axis, the message's only variable is cut between slices along it. Otherwise the message may be cut between
    any two elements.

    Raises:
        ValueError: the axis does not exist, or there are fewer slices or elements than shards.
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
