"""The registry of codec declarations. `lightning_autosync.engine.codecs` has their implementations.

Each file of this package defines a subclass of `CodecFormat` and ends with ``register(...)``; it needs no other
reference. Another package registers its own codecs by an entry point of the group ``lightning_autosync.codecs``; its
value is a module that calls `register` on import.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from lightning_autosync.documents import unknown_name
from lightning_autosync.errors import PlanError
from lightning_autosync.plan.codecs.base import SETTINGS, CodecFormat
from lightning_autosync.plan.plugins import import_entry_points, import_modules

if TYPE_CHECKING:
    from lightning_autosync.plan.spec import Compressor

ENTRY_POINTS = "lightning_autosync.codecs"

_registered: dict[str, CodecFormat] = {}


def register(codec: CodecFormat) -> None:
    """Register a codec, so that plans can name it.

    Raises:
        PlanError: its name is taken, or ``encoded_as`` is not one of this package's codecs.
    """
    source = f"{type(codec).__module__}.{type(codec).__name__}"
    if other := _registered.get(codec.name):
        raise PlanError(
            f"codec '{codec.name}' of {source}: {type(other).__module__}.{type(other).__name__} already has this name"
        )
    own = type(codec).__module__.startswith(f"{__name__}.")
    if not own and codec.encoded_as not in _registered:
        raise PlanError(
            f"codec '{codec.name}' of {source}: encoded_as is '{codec.encoded_as}'; allowed: {', '.join(_registered)}"
        )
    _registered[codec.name] = codec


def find(name: str) -> CodecFormat:
    """The codec with this name.

    Raises:
        PlanError: there is no such codec.
    """
    _load()
    if name not in _registered:
        raise PlanError(f"compressor: '{name}' is {unknown_name(name, names())}")
    return _registered[name]


def names() -> tuple[str, ...]:
    """Names of all codecs; this package's codecs come first."""
    _load()
    return tuple(sorted(_registered, key=lambda name: (_registered[name].place, name)))


def encoded_bytes(compressor: Compressor, numel: int, tail: int, itemsize: int) -> int:
    """See `CodecFormat.encoded_bytes`."""
    return find(compressor.kind).encoded_bytes(compressor, numel, tail, itemsize)


@cache
def _load() -> None:
    import_modules(__name__, __path__)
    import_entry_points(ENTRY_POINTS)


__all__ = ["SETTINGS", "CodecFormat", "encoded_bytes", "find", "names", "register"]
