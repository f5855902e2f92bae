"""PowerSGD: matrices are sent as two low-rank factors in two rounds (Vogels et al., 2019, algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from lightning_autosync.plan.codecs import CodecFormat, register

if TYPE_CHECKING:
    from lightning_autosync.plan.spec import Compressor, Group


class PowerSGD(CodecFormat):
    """Factors of rank ``compressor.rank``."""

    name = encoded_as = "powersgd"
    sums = "plain"
    settings = ("rank",)
    place = 5

    def check(self, group: Group) -> None:
        if group.partition and group.partition.axis is not None:
            raise ValueError("partition.axis: not allowed with powersgd, whose factors are cut as one; leave it out")

    def rounds(self, compressor: Compressor, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return low_rank_layout(shapes, compressor.rank)[1]


@dataclass(frozen=True)
class Factor:
    """Position of a variable's factors in the two rounds.

    A variable, seen as a matrix ``[rows, columns]``, sends P ``[rows, rank]`` in the first round and Q
    ``[columns, rank]`` in the second. A variable that would not shrink has ``rank`` 0 and is sent whole in the first.

    Attributes:
        shape: shape of the variable.
        rank: rank of the factors.
        first, second: offsets of the factors in the two rounds, in elements.
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
    """The factors of each variable, and the number of elements of both rounds."""
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


register(PowerSGD())
