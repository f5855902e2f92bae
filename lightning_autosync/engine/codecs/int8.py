"""8-bit integers with one scale per block."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from lightning_autosync.engine.codecs import BaseCodec, register
from lightning_autosync.plan.codecs.base import COUNT_BYTES
from lightning_autosync.plan.spec import Compressor

_LEVELS = 127.0


class Int8Codec(BaseCodec):
    """Encodes ``round(127 x / max|x|)`` per block. Layout: float32 scales, counts, int8 values."""

    def __init__(self, compressor: Compressor, numel: int, tail: int) -> None:
        super().__init__(compressor, numel, tail)
        self._block = compressor.block
        self._blocks = ceil(self.body / self._block)
        self._integers = 4 * self._blocks + COUNT_BYTES * tail
        self._padded = torch.zeros(self._blocks, self._block)

    def encode(self, values: Tensor, wire: Tensor) -> None:
        blocks = self._padded.to(values.device)
        blocks.view(-1)[: self.body] = values[: self.body]
        scales = blocks.abs().amax(dim=1, keepdim=True) / _LEVELS
        wire[: 4 * self._blocks].view(torch.float32).copy_(scales.view(-1))
        # A block of zeros has scale 0. Any other divisor keeps it zero and avoids NaNs.
        scales[scales == 0] = 1.0
        integers = torch.round(blocks / scales).view(-1)[: self.body]
        wire[self._integers :].view(torch.int8).copy_(integers)
        self._tail_of(wire, 4 * self._blocks).copy_(values[self.body :])

    def decode(self, wire: Tensor, values: Tensor) -> None:
        scales = wire[: 4 * self._blocks].view(torch.float32)
        blocks = self._padded.to(values.device)
        blocks.view(-1)[: self.body] = wire[self._integers :].view(torch.int8)
        values[: self.body] = (blocks * scales[:, None]).view(-1)[: self.body]
        values[self.body :] = self._tail_of(wire, 4 * self._blocks)


register("int8", Int8Codec)
