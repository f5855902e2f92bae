"""Top-k: the elements with the largest magnitudes, and their positions."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from lightning_autosync.plan.codecs import CodecFormat, register
from lightning_autosync.plan.codecs.base import COUNT_BYTES

if TYPE_CHECKING:
    from lightning_autosync.plan.spec import Compressor


class TopK(CodecFormat):
    """The largest elements, a share ``compressor.ratio`` of all, each with its position."""

    name = encoded_as = "topk"
    settings = ("ratio",)
    place = 4

    def encoded_bytes(self, compressor: Compressor, numel: int, tail: int, itemsize: int) -> int:
        return 8 * kept_elements(compressor, numel - tail) + COUNT_BYTES * tail


def kept_elements(compressor: Compressor, numel: int) -> int:
    """Number of elements that are kept of ``numel``."""
    return min(numel, ceil(compressor.ratio * numel))


register(TopK())
