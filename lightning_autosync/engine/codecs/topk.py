"""The elements of largest magnitude, with their positions."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_autosync.engine.codecs import BaseCodec, register
from lightning_autosync.plan.codecs.topk import kept_elements
from lightning_autosync.plan.spec import Compressor


class TopKCodec(BaseCodec):
    """Keeps the share ``ratio`` of largest magnitudes in a range. Layout: int32 positions, float32 values, counts."""

    def __init__(self, compressor: Compressor, numel: int, tail: int) -> None:
        super().__init__(compressor, numel, tail)
        self._kept = kept_elements(compressor, self.body)

    def encode(self, values: Tensor, wire: Tensor) -> None:
        body = values[: self.body]
        positions = torch.topk(body.abs(), self._kept, sorted=False).indices
        wire[: 4 * self._kept].view(torch.int32).copy_(positions)
        wire[4 * self._kept : 8 * self._kept].view(torch.float32).copy_(body[positions])
        self._tail_of(wire, 8 * self._kept).copy_(values[self.body :])

    def decode(self, wire: Tensor, values: Tensor) -> None:
        positions = wire[: 4 * self._kept].view(torch.int32).long()
        if self._kept and (int(positions.max()) >= self.body or int(positions.min()) < 0):
            raise ValueError(f"a top-k position is out of range; the message part has {self.body} elements")
        values[: self.body] = 0
        values[positions] = wire[4 * self._kept : 8 * self._kept].view(torch.float32).to(values.dtype)
        values[self.body :] = self._tail_of(wire, 8 * self._kept)


register("topk", TopKCodec)
