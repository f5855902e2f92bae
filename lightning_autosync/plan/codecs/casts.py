"""Casts to 16 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_autosync.plan.codecs import CodecFormat, register

if TYPE_CHECKING:
    from lightning_autosync.plan.spec import Compressor


class HalfPrecision(CodecFormat):
    """IEEE half precision; values out of range become the largest finite value."""

    name = encoded_as = "fp16"
    sums = "cast"
    settings = ()
    offered = False  # bf16 has the same size, and the range of float32
    place = 1

    def encoded_bytes(self, compressor: Compressor, numel: int, tail: int, itemsize: int) -> int:
        return 2 * numel


class BFloat16(HalfPrecision):
    """16 bits with the range of float32."""

    name = encoded_as = "bf16"
    offered = True
    place = 2


register(HalfPrecision())
register(BFloat16())
