"""Casts to 16-bit floating-point types."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from lightning_autosync.engine.codecs import BaseCodec, register


class CastCodec(BaseCodec):
    """Casts elements to a narrower dtype, in which a backend can sum them.

    Attributes:
        dtype: the narrower dtype.
    """

    dtype: ClassVar[torch.dtype]

    def encode(self, values: Tensor, wire: Tensor) -> None:
        self.cast(values, wire.view(self.dtype))

    def decode(self, wire: Tensor, values: Tensor) -> None:
        values.copy_(wire.view(self.dtype))

    def cast(self, values: Tensor, target: Tensor) -> None:
        """Copy ``values`` into ``target``, which has `dtype`. Infinities and NaNs stay visible to gradient scalers."""
        target.copy_(values)


class HalfPrecisionCodec(CastCodec):
    """``fp16`` saturates at its largest finite value instead of overflowing."""

    dtype = torch.float16

    def cast(self, values: Tensor, target: Tensor) -> None:
        if values.dtype != torch.float16:
            largest = torch.finfo(torch.float16).max
            values = torch.where(values.isinf(), values, values.clamp(-largest, largest))
        target.copy_(values)


class BFloat16Codec(CastCodec):
    """``bf16`` has the range of float32."""

    dtype = torch.bfloat16


register("fp16", HalfPrecisionCodec)
register("bf16", BFloat16Codec)
