"""Shards: the position of a rank's part in a parameter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor


class AxisCut(NamedTuple):
    """The cut of one axis.

    Attributes:
        parts: number of results that follow each other along the axis, each of which is cut by itself.
        dimensions: dimensions of the mesh that cut each part: the first one into blocks, the next one each block, and
            so on.
        block: index of this rank's block in each part.
        blocks: number of blocks of each part.
    """

    axis: int
    parts: int
    dimensions: tuple[int, ...]
    block: int
    blocks: int


class ElementBox(NamedTuple):
    """A box of elements.

    Attributes:
        offsets: offsets in the whole tensor.
        local: offsets in the rank's part.
        sizes: sizes of the box.
    """

    offsets: tuple[int, ...]
    local: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class ParameterShard:
    """A rank's part of a tensor.

    Attributes:
        shape: shape of the whole tensor.
        cuts: cuts of its axes; empty if the rank has the whole tensor.
    """

    shape: tuple[int, ...]
    cuts: tuple[AxisCut, ...] = ()

    @property
    def dimensions(self) -> tuple[int, ...]:
        """The dimensions of the mesh along which ranks have different parts."""
        return tuple(sorted(k for cut in self.cuts for k in cut.dimensions))

    @property
    def local_shape(self) -> tuple[int, ...]:
        shape = list(self.shape)
        for cut in self.cuts:
            shape[cut.axis] //= cut.blocks
        return tuple(shape)

    @property
    def pieces(self) -> int:
        """Number of different parts of the tensor."""
        return prod(cut.blocks for cut in self.cuts)

    def take(self, whole: Tensor) -> Tensor:
        """[local shape] a copy of the rank's part of a tensor [shape]."""
        part = whole
        for cut in self.cuts:
            split = part.unflatten(cut.axis, (cut.parts, cut.blocks, -1))
            part = split.select(cut.axis + 1, cut.block).flatten(cut.axis, cut.axis + 1)
        return part.clone(memory_format=torch.contiguous_format if self.cuts else torch.preserve_format)

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Copy the rank's part [local shape] to its position in a tensor [shape]."""
        for chunk in self.chunks():
            _box(whole, chunk.offsets, chunk.sizes).copy_(_box(part, chunk.local, chunk.sizes))

    def chunks(self) -> Iterator[ElementBox]:
        """The boxes that make up the rank's part."""
        runs: list[list[tuple[int, int, int]]] = [[(0, 0, size)] for size in self.shape]
        for cut in self.cuts:
            part = self.shape[cut.axis] // cut.parts
            size = part // cut.blocks
            runs[cut.axis] = [(at * part + cut.block * size, at * size, size) for at in range(cut.parts)]
        for run in product(*runs):
            offsets, local, sizes = zip(*run, strict=True) if run else ((), (), ())
            yield ElementBox(tuple(offsets), tuple(local), tuple(sizes))

    def at(self, coordinates: tuple[int, ...], sizes: tuple[int, ...]) -> ParameterShard:
        """The shard of the same tensor on the rank with other coordinates."""
        cuts = []
        for cut in self.cuts:
            block = 0
            for k in cut.dimensions:
                block = block * sizes[k] + coordinates[k]
            cuts.append(cut._replace(block=block))
        return ParameterShard(self.shape, tuple(cuts))


def _box(tensor: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    for axis, (start, length) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(axis, start, length)
    return tensor
