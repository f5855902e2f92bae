"""The pieces of a transfer on one rank: where each lies, what it waits for, what it becomes on the wire."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_autosync.engine.codecs import Codec, Residual, make_codec
from lightning_autosync.engine.exchanges.base import byte_view
from lightning_autosync.engine.transport import UP
from lightning_autosync.plan.schedule import TreeTransfer
from lightning_autosync.plan.spec import Compressor


@dataclass
class Path:
    """One transfer as this rank sees it: its neighbours on both trees, and the pieces."""

    up_parent: int | None
    up_children: tuple[int, ...]
    down_parent: int | None
    down_children: tuple[int, ...]
    segments: list[Segment] = field(default_factory=list)


class Segment:
    """One piece of a transfer.

    Args:
        path: its transfer.
        piece: its number in the transfer.
        place: how far along the transfer it lies, 0 to 1.
        values: view of the message's buffer.
        wire: what travels: ``values`` itself, or [codec.size] bytes.
        scratch: for each child below, where its contribution arrives.
        codec: None if values travel as they are.
        residual: view of the error-feedback memory, with the memory it belongs to.
    """

    __slots__ = (
        "_codec",
        "_decoded",
        "_inboxes",
        "_residual",
        "_scratch",
        "_wire",
        "gathering",
        "missing",
        "path",
        "piece",
        "place",
        "values",
        "wire_bytes",
    )

    def __init__(
        self,
        path: Path,
        piece: int,
        place: float,
        values: Tensor,
        wire: Tensor,
        scratch: dict[int, Tensor],
        codec: Codec | None,
        residual: tuple[Residual, Tensor] | None,
    ) -> None:
        self.path = path
        self.piece = piece
        self.place = place
        self.values = values
        self.wire_bytes = byte_view(wire)
        self.missing = len(path.up_children)
        self.gathering = 1
        self._wire = wire
        self._codec = codec
        self._residual = residual
        self._scratch = scratch
        self._decoded = torch.empty_like(values) if codec is not None and scratch else None
        self._inboxes = {peer: byte_view(tensor) for peer, tensor in scratch.items()}

    def inbox(self, peer: int, phase: int) -> memoryview | None:
        """Where bytes from this peer go; None if it has nothing to send."""
        if phase == UP:
            return self._inboxes.get(peer)
        return self.wire_bytes if peer == self.path.down_parent else None

    def reduce(self) -> None:
        """Add the children's contributions, in rank order, and begin to gather the next step's."""
        for child in self.path.up_children:
            contribution = self._scratch[child]
            if self._codec is not None:
                assert self._decoded is not None
                self._codec.decode(contribution, self._decoded)
                contribution = self._decoded
            self.values.add_(contribution)
        self.missing = len(self.path.up_children)
        self.gathering += 1

    def seal(self) -> None:
        """Make the wire form of the values; afterwards the root holds what everybody will decode."""
        if self._codec is None:
            return
        if self._residual is not None:
            memory, view = self._residual
            memory.encode(self._codec, self.values, view, self._wire)
        else:
            self._codec.encode(self.values, self._wire)
            if self.path.up_parent is None:
                self._codec.decode(self._wire, self.values)

    def open(self) -> None:
        """Make values of the wire form that came down."""
        if self._codec is not None:
            self._codec.decode(self._wire, self.values)


def lay_out(
    transfer: TreeTransfer,
    rank: int,
    compressor: Compressor,
    buffer: Tensor,
    tail_start: int,
    residual: Residual | None,
) -> Path:
    """Cut a transfer into segments and give each its memory; elements from ``tail_start`` on are counts."""
    up, down = transfer.reduce, transfer.broadcast
    path = Path(
        up_parent=up.parents[rank] if up.parents[rank] >= 0 else None,
        up_children=up.children[rank],
        down_parent=down.parents[rank] if down.parents[rank] >= 0 else None,
        down_children=down.children[rank],
    )
    span = transfer.stop - transfer.start
    for piece, start in enumerate(range(transfer.start, transfer.stop, transfer.segment)):
        stop = min(start + transfer.segment, transfer.stop)
        values = buffer[start:stop]
        codec = make_codec(compressor, stop - start, min(stop - start, max(0, stop - tail_start)))
        path.segments.append(
            Segment(
                path=path,
                piece=piece,
                place=(start - transfer.start) / span,
                values=values,
                wire=values if codec is None else _encoded_buffer(codec),
                scratch={
                    child: torch.empty_like(values) if codec is None else _encoded_buffer(codec)
                    for child in path.up_children
                },
                codec=codec,
                residual=(residual, residual.values[start:stop]) if residual is not None else None,
            )
        )
    return path


def _encoded_buffer(codec: Codec) -> Tensor:
    # A tensor of its own is aligned for every element type.
    return torch.empty(codec.size, dtype=torch.uint8)
