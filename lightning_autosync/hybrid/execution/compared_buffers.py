"""What must be the same on all ranks of a split model: its buffers, and what a pass did."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from numbers import Number
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_autosync.hybrid.execution.live_mesh import LiveMesh

_CHUNK = 2**20
"""Words of 8 bytes that `checksum` reads at a time, which bounds its memory."""
_SPREAD, _MIX = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9
"""Factors of splitmix64 as signed numbers, from which `checksum` makes weights that follow no simple rule."""


class ComparedBuffers:
    """Knows which buffers are the same on all ranks, with few messages of its own.

    Ranks exchange checksums of buffers before each pass, in the message that they send anyway. Whether a use of a
    buffer needs another comparison depends only on what they exchanged. If it depended on what this rank did to the
    buffer in the pass, some ranks might call a collective that others do not.

    In the first pass of training and of evaluation, and for buffers that a pass changed on any rank, each use is
    compared.
    """

    def __init__(self, mesh: LiveMesh) -> None:
        self._mesh = mesh
        self.watch(())

    def watch(self, buffers: Iterable[Tensor]) -> None:
        """Forget everything, and know these buffers from now on; the same ones on all ranks."""
        self._buffers = list(buffers)
        self._place = {id(buffer): place for place, buffer in enumerate(self._buffers)}
        self._used: dict[bool, set[int]] = {}
        self._training = True
        self._is_first = False
        self._known: dict[int, bool] = {}
        self._versions = [0] * len(self._buffers)
        self._sums: Tensor | None = None
        self._changed = [0] * len(self._buffers)
        self._changed_contents: Tensor | None = None

    def exchange(self, number: int, device: torch.device, training: bool) -> bool:
        """Exchange checksums before a pass; collective.

        Args:
            number: a number that ranks compare.

        Returns:
            Whether ``number`` is the same on all ranks.
        """
        self._training, self._is_first = training, training not in self._used
        used = self._used.setdefault(training, set())
        self._versions = [_version(buffer) for buffer in self._buffers]
        self._sums = self._checksums(range(len(self._buffers)) if self._is_first else used, device)
        changed = torch.tensor(self._changed, dtype=torch.int64, device=device)
        if self._changed_contents is not None:
            changed = changed | self._changed_contents
        own = torch.cat([torch.tensor([number], device=device), self._sums])
        # The maximum of the negated numbers is the negated minimum, so one all-reduce gives both.
        largest = self._mesh.largest(torch.cat([own, -own, changed]))
        count = len(own)
        same = [high == -low for high, low in zip(largest[:count], largest[count : 2 * count], strict=True)]
        self._changed, self._changed_contents = largest[2 * count :], None
        trusted = () if self._is_first else (place for place in used if not self._changed[place])
        self._known = {place: same[1 + place] for place in trusted if _has_bytes(self._buffers[place])}
        return same[0]

    def end_pass(self) -> None:
        """Note which buffers the pass changed on this rank."""
        used = self._used.get(self._training, set())
        for place in used:
            self._changed[place] |= int(self.is_changed(place))
        if self._is_first and used and self._sums is not None:
            # Changes of `data` count no versions. Reading the result would wait for an accelerator.
            now = self._checksums(used, self._sums.device)
            read = torch.zeros_like(now)
            read[sorted(used)] = 1
            self._changed_contents = (now != self._sums).long() * read
        self._is_first = False

    def place(self, value: Tensor) -> int | None:
        """The number of the buffer that a tensor is, or is a view of; None if it is none."""
        own = self._place.get(id(value))
        if own is None and value._is_view() and value._base is not None:
            return self._place.get(id(value._base))
        return own

    def use(self, place: int) -> bool | None:
        """Whether a buffer was the same on all ranks before the pass; None if its use must be compared."""
        self._used.setdefault(self._training, set()).add(place)
        return self._known.get(place)

    def is_changed(self, place: int) -> bool:
        """Whether the buffer changed on this rank since the exchange."""
        return _version(self._buffers[place]) != self._versions[place]

    def _checksums(self, places: Iterable[int], device: torch.device) -> Tensor:
        """[buffers] checksums; 0 for other buffers than ``places``."""
        read = {place for place in places if _has_bytes(self._buffers[place])}
        zero = torch.zeros((), dtype=torch.int64, device=device)
        found = [checksum(buffer).to(device) if place in read else zero for place, buffer in enumerate(self._buffers)]
        return torch.stack(found) if found else zero.new_empty(0)


def checksum(value: Tensor) -> Tensor:
    """[] a number that depends on all bits of a tensor and their places; nothing waits for the tensor's device."""
    data = value.detach().contiguous().reshape(-1).view(torch.uint8)
    words = F.pad(data, (0, -len(data) % 8)).view(torch.int64)
    total = torch.full((), value.numel(), device=value.device)
    for number, part in enumerate(words.split(_CHUNK)):
        places = (torch.arange(len(part), device=value.device) + (number * _CHUNK + 1)) * _SPREAD
        weights = (places ^ (places >> 31)) * _MIX | 1
        # Without this, changes of two highest bits would cancel: a product with any odd number changes only that bit.
        total = total + ((part ^ (part >> 32)) * weights).sum()
    return total


def _has_bytes(buffer: Tensor) -> bool:
    return buffer.layout is torch.strided and not buffer.is_meta and not buffer.is_quantized


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version


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
