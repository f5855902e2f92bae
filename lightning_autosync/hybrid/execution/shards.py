"""Which part of a parameter a rank has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor


class Cut(NamedTuple):
    """How one axis is cut.

    Attributes:
        axis: the axis.
        parts: how many results lie one after the other along it, each cut by itself.
        dimensions: of the mesh, that cut each part: the first one into blocks, the next one each block, and so on.
        block: this rank's, of each part.
        blocks: of each part.
    """

    axis: int
    parts: int
    dimensions: tuple[int, ...]
    block: int
    blocks: int


class Chunk(NamedTuple):
    """A box of elements: where it lies in the whole tensor and in a rank's part."""

    offsets: tuple[int, ...]
    local: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """A rank's part of a tensor.

    Attributes:
        shape: of the whole tensor.
        cuts: of its axes; none if the rank has all of it.
    """

    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()

    @property
    def dimensions(self) -> tuple[int, ...]:
        """The dimensions of the mesh along which ranks have other parts."""
        return tuple(sorted(k for cut in self.cuts for k in cut.dimensions))

    @property
    def local_shape(self) -> tuple[int, ...]:
        shape = list(self.shape)
        for cut in self.cuts:
            shape[cut.axis] //= cut.blocks
        return tuple(shape)

    @property
    def pieces(self) -> int:
        """How many parts the tensor has."""
        return prod(cut.blocks for cut in self.cuts)

    def take(self, whole: Tensor) -> Tensor:
        """[local shape] the rank's part of a tensor [shape], in memory of its own."""
        part = whole
        for cut in self.cuts:
            apart = part.unflatten(cut.axis, (cut.parts, cut.blocks, -1))
            part = apart.select(cut.axis + 1, cut.block).flatten(cut.axis, cut.axis + 1)
        return part.clone(memory_format=torch.contiguous_format if self.cuts else torch.preserve_format)

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Copy the rank's part [local shape] into its place in a tensor [shape]."""
        for chunk in self.chunks():
            _box(whole, chunk.offsets, chunk.sizes).copy_(_box(part, chunk.local, chunk.sizes))

    def chunks(self) -> Iterator[Chunk]:
        """The boxes of the whole tensor that make up the part."""
        runs: list[list[tuple[int, int, int]]] = [[(0, 0, size)] for size in self.shape]
        for cut in self.cuts:
            part = self.shape[cut.axis] // cut.parts
            size = part // cut.blocks
            runs[cut.axis] = [(at * part + cut.block * size, at * size, size) for at in range(cut.parts)]
        for run in product(*runs):
            offsets, local, sizes = zip(*run, strict=True) if run else ((), (), ())
            yield Chunk(tuple(offsets), tuple(local), tuple(sizes))

    def at(self, coordinates: tuple[int, ...], sizes: tuple[int, ...]) -> Shard:
        """The part that the rank at other coordinates has of the same tensor."""
        cuts = []
        for cut in self.cuts:
            block = 0
            for k in cut.dimensions:
                block = block * sizes[k] + coordinates[k]
            cuts.append(cut._replace(block=block))
        return Shard(self.shape, tuple(cuts))


def _box(tensor: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    for axis, (start, length) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(axis, start, length)
    return tensor
