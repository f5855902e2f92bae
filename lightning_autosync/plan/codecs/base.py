"""What a plan has to know of a codec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from lightning_autosync.documents import Record
    from lightning_autosync.plan.spec import Compressor, Group

COUNT_BYTES = 4
"""Bytes of one gradient count behind an encoded message."""

Sum = Literal["plain", "cast", "decoded"]


class CodecFormat:
    """The declared half of a codec: name, settings, and size on the wire. `lightning_autosync.engine.codecs` runs it.

    Attributes:
        name: the compressor's ``kind`` in plans.
        sums: how encoded messages are summed: ``plain`` ones hold ordinary elements; of a ``cast``, a backend sums the
            encoded elements; others are ``decoded``, summed, and encoded again.
        encoded_as: the codec of this package whose cost the replay takes for it, and for which learned simulators take
            it.
        options: the settings under ``options`` that it takes, as a `Record`; None for none.
        offered: whether the search for plans may draw it, with default settings.
        place: its place in the order of codecs.
        module: the module that registers its executing half, for a codec of another package.
    """

    name: ClassVar[str]
    sums: ClassVar[Sum] = "decoded"
    encoded_as: ClassVar[str]
    options: ClassVar[type[Record] | None] = None
    offered: ClassVar[bool] = True
    place: ClassVar[int] = 100
    module: ClassVar[str | None] = None

    def check(self, group: Group) -> None:
        """Refuse groups that it cannot encode.

        Raises:
            ValueError: it names the field.
        """

    def rounds(self, compressor: Compressor, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Elements of each round of a message, if they are not those of its variables; see `PowerSGD`."""
        return ()

    def encoded_bytes(self, compressor: Compressor, numel: int, tail: int, itemsize: int) -> int:
        """Bytes on the wire.

        Args:
            compressor: the settings.
            numel: elements.
            tail: how many of them, at the end, are counts, which travel exact.
            itemsize: bytes of an element.
        """
        return itemsize * numel
