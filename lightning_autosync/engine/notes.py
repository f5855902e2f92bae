"""`Notes`: a few numbers of each rank that travel with a message, in place of an exchange of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MOST = 4096
"""Numbers of all ranks that may travel with a message."""


class Notes:
    """The end of a message's buffer, in which each rank has a row of its own; the sum over ranks has all rows.

    Args:
        room: [ranks * numbers], the memory, behind the message's own; the exchange sums it in place.
        rank: this rank.
        world_size: number of ranks.

    Attributes:
        travelled: whether the numbers have travelled since `write`.
    """

    def __init__(self, room: Tensor, rank: int, world_size: int) -> None:
        self._rows = room.view(world_size, -1)
        self._own_row = self._rows[rank]
        self._own = torch.zeros_like(self._own_row)
        self.travelled = False

    def write(self, numbers: Sequence[float]) -> None:
        """Let these numbers of this rank travel with the next exchange of the message."""
        self._own = torch.tensor(numbers, dtype=self._rows.dtype)
        self.travelled = False

    def fill(self) -> None:
        """Put this rank's numbers into the buffer; called right before each exchange."""
        self._rows.zero_()
        self._own_row.copy_(self._own)
        self.travelled = True

    def of_ranks(self) -> list[list[float]]:
        """[ranks][numbers] the numbers after the exchange, rounded to the dtype of the message."""
        found: list[list[float]] = self._rows.tolist()
        return found


def can_carry(dtype: torch.dtype, numbers: int) -> bool:
    """Whether messages of this dtype carry so many numbers (those of all ranks) without a loss that matters."""
    return dtype in (torch.float32, torch.float64) and 0 < numbers <= MOST
