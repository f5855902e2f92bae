"""8-bit integers with one scale per block."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from lightning_autosync.plan.codecs import CodecFormat, register
from lightning_autosync.plan.codecs.base import COUNT_BYTES

if TYPE_CHECKING:
    from lightning_autosync.plan.spec import Compressor


class Int8(CodecFormat):
    """``round(127 x / max|x|)`` in blocks of ``compressor.block`` elements."""

    name = encoded_as = "int8"
    settings = ("block",)
    place = 3

    def encoded_bytes(self, compressor: Compressor, numel: int, tail: int, itemsize: int) -> int:
        body = numel - tail
        return body + 4 * ceil(body / compressor.block) + COUNT_BYTES * tail


register(Int8())
