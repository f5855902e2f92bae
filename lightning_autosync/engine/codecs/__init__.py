"""Implementations of codecs, found by the names under which `lightning_autosync.plan.codecs` declares their formats.

Each file of this package holds a class that satisfies `Codec`, and ends with ``register(...)``. A codec of another
package is registered by the module that its format names.
"""

from __future__ import annotations

import importlib
from functools import cache

from lightning_autosync.engine.codecs.base import BaseCodec, Codec, encode_with_feedback
from lightning_autosync.errors import PlanError
from lightning_autosync.plan import codecs as formats
from lightning_autosync.plan.plugins import import_modules, mismatch
from lightning_autosync.plan.spec import Compressor

_registered: dict[str, type[Codec]] = {}


def register(name: str, codec: type[Codec]) -> None:
    """Register the implementation of a codec.

    Args:
        name: the name under which its `CodecFormat` is registered.
        codec: the implementation; a subclass of `CastCodec` if the format's ``sums`` is ``cast``.

    Raises:
        PlanError: the name is taken, or the class is no `Codec`.
    """
    where = f"codec '{name}': {codec.__module__}.{codec.__name__}"
    if name in _registered:
        raise PlanError(f"{where}: {_registered[name].__module__}.{_registered[name].__name__} already has this name")
    for method in ("__init__", "encode", "decode"):
        if fault := mismatch(getattr(codec, method, lambda: None), getattr(Codec, method)):
            raise PlanError(f"{where}: {method}: {fault}")
    _registered[name] = codec


def make_codec(compressor: Compressor, numel: int, tail: int) -> Codec | None:
    """The codec for a range of elements; None for compressors whose messages hold plain elements.

    Args:
        compressor: kind and settings.
        numel: number of elements in the range, counts included.
        tail: number of counts at the end of the range.

    Raises:
        PlanError: no implementation of this kind is registered.
    """
    if formats.find(compressor.kind).sums == "plain":
        return None
    return _find(compressor.kind)(compressor, numel, tail)


@cache
def _find(name: str) -> type[Codec]:
    import_modules(__name__, __path__)
    module = formats.find(name).module
    if name not in _registered and module is not None:
        importlib.import_module(module)
    if name not in _registered:
        raise PlanError(f"compressor: '{name}' has a CodecFormat but no Codec: its package must register a Codec")
    return _registered[name]


__all__ = ["BaseCodec", "Codec", "encode_with_feedback", "make_codec", "register"]
