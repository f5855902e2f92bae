"""What compressors make of a message: sizes and layouts, shared by engine and replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

from lightning_autosync.plan.spec import Compressor

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
