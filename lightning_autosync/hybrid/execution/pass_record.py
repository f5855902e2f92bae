"""`PassRecord`: what a pass did on this rank that must be the same on all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from lightning_autosync.hybrid.execution.compared_buffers import checksum


class PassRecord:
    """Checksums of a pass, which ranks compare before the next one.

    Ranks that take different ways through the model's code send messages that do not belong together. Ranks that use
    different numbers compute parts that do not belong together. Backends report neither.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._numbers = 0
        self._buffers = 0
        self._inputs: list[tuple[str, Tensor]] = []

    def note(self, *facts: object) -> None:
        """Note a call of a split operator or a change of layout."""
        self._calls = zlib.crc32(repr(facts).encode(), self._calls)

    def note_numbers(self, name: str, arguments: Iterable[object]) -> None:
        """Note the numbers, those of NumPy too, slices and shapes among the arguments of a function of parts."""
        numbers = [str(item) for item in arguments if isinstance(item, Number | slice | torch.Size)]
        if numbers:
            self._numbers = zlib.crc32(repr((name, numbers)).encode(), self._numbers)

    def note_buffer(self, checksum: int) -> None:
        """Note the contents of a buffer that the pass changed on this rank, and then used as if all ranks had."""
        self._buffers = zlib.crc32(repr(checksum).encode(), self._buffers)

    def note_input(self, layer: str, value: Tensor) -> None:
        """Note an input that a split layer takes for the same on all ranks."""
        self.note("input", layer)
        self._inputs.append((layer, checksum(value)))  # read in `take`, because here it would wait for a GPU

    def take(self) -> tuple[int, int, int, list[list[Any]]]:
        """The checksums of calls, of numbers, of changed buffers and of each layer's inputs since the last call."""
        inputs = [[layer, int(found)] for layer, found in self._inputs]
        found = self._calls, self._numbers, self._buffers, inputs
        self._calls = self._numbers = self._buffers = 0
        self._inputs.clear()
        return found
