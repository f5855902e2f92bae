"""`CodecFormat`: the declaration of a codec, as plans need it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from lightning_autosync.documents import Record
    from lightning_autosync.plan.spec import Compressor, Group

COUNT_BYTES = 4
"""Bytes of one gradient count behind an encoded message."""

SETTINGS = ("ratio", "rank", "block")
"""Fields of `Compressor` that only some codecs read."""

Sum = Literal["plain", "cast", "decoded"]


class CodecFormat:
    """The declaration of a codec: name, settings and size on the wire. `lightning_autosync.engine.codecs` runs it.

    Attributes:
        name: the compressor's ``kind`` in plans.
        sums: how encoded messages are summed. ``plain``: they hold ordinary elements. ``cast``: a backend sums the
            encoded elements. ``decoded``: they are decoded, summed and encoded again.
        encoded_as: this package's codec that replay and learned simulators substitute for it.
        settings: fields of `Compressor` that it reads besides ``error_feedback`` and ``options``; others are refused.
        options: `Record` of its settings under ``options``; None if it has none.
        offered: whether the search for plans may use it, with default settings.
        place: sort key in the list of codecs.
        module: module that registers its implementation, for a codec of another package.
    """

    name: ClassVar[str]
    sums: ClassVar[Sum] = "decoded"
    encoded_as: ClassVar[str]
    settings: ClassVar[tuple[str, ...]] = SETTINGS
    options: ClassVar[type[Record] | None] = None
    offered: ClassVar[bool] = True
    place: ClassVar[int] = 100
    module: ClassVar[str | None] = None

    def check(self, group: Group) -> None:
        """Check that the codec can encode a group.

        Raises:
            ValueError: it cannot; the message names the field.
        """

    def rounds(self, compressor: Compressor, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Number of elements of each round of a message; empty if it has one round with its variables' elements.

        ``shapes`` are those of the variables. See `PowerSGD`.
        """
        return ()

    def encoded_bytes(self, compressor: Compressor, numel: int, tail: int, itemsize: int) -> int:
        """Bytes on the wire.

        Args:
            compressor: the settings.
            numel: number of elements.
            tail: number of elements at the end that are counts, which are never compressed.
            itemsize: bytes per element.
        """
        return itemsize * numel
