"""Casts to sixteen bits."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_autosync.engine.codecs.base import Codec
from lightning_autosync.plan.spec import Compressor

CAST_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class CastCodec(Codec):
    """Sixteen-bit floats; ``fp16`` saturates at its largest finite value instead of overflowing."""

    def __init__(self, compressor: Compressor, numel: int, tail: int) -> None:
        super().__init__(compressor, numel, tail)
        self._dtype = CAST_TYPES[compressor.kind]

    def encode(self, values: Tensor, wire: Tensor) -> None:
        cast(values, wire.view(self._dtype))

    def decode(self, wire: Tensor, values: Tensor) -> None:
        values.copy_(wire.view(self._dtype))


def cast(values: Tensor, target: Tensor) -> None:
    """Copy into a narrower type; infinities and NaNs stay, so that a gradient scaler still sees them."""
    if target.dtype == torch.float16 and values.dtype != torch.float16:
        largest = torch.finfo(torch.float16).max
        target.copy_(torch.where(values.isinf(), values, values.clamp(-largest, largest)))
    else:
        target.copy_(values)
