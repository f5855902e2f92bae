"""Lossy forms of messages: casts, integers, sparsification."""

from __future__ import annotations

from lightning_autosync.engine.codecs.base import Codec, Residual
from lightning_autosync.engine.codecs.casts import CAST_TYPES, CastCodec, cast
from lightning_autosync.engine.codecs.int8 import Int8Codec
from lightning_autosync.engine.codecs.topk import TopKCodec
from lightning_autosync.plan.spec import Compressor

_CODECS: dict[str, type[Codec]] = {
    "fp16": CastCodec,
    "bf16": CastCodec,
    "int8": Int8Codec,
    "topk": TopKCodec,
}


def make_codec(compressor: Compressor, numel: int, tail: int) -> Codec | None:
    """The codec for a run of elements; None for kinds that sum what they send (``none``, ``powersgd``)."""
    codec = _CODECS.get(compressor.kind)
    return codec(compressor, numel, tail) if codec else None


__all__ = ["CAST_TYPES", "Codec", "Residual", "cast", "make_codec"]
