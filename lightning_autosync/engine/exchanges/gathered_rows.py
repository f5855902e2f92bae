"""Row-wise messages whose rows travel once: each rank broadcasts its rows along trees, and adds up those of all ranks.

The number of rows differs between ranks and steps. Each frame therefore tells how many there are, so that no exchange
of sizes comes first.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise

import numpy
import torch

from lightning_autosync.engine.exchanges.base import byte_view
from lightning_autosync.engine.exchanges.rows import RowExchange, Rows, add_rows
from lightning_autosync.engine.exchanges.trees import TransportSteps
from lightning_autosync.engine.profiling import profiled
from lightning_autosync.engine.transport import DOWN, Frame, Peer, Transport
from lightning_autosync.errors import ExchangeError
from lightning_autosync.plan.schedule import Message, RowBroadcast, index_bytes, used_broadcasts

_HEADER = struct.Struct("=3q")
"""In front of the rows of each piece, as int64: the number of gradients, of rows in all pieces of the part, and of
transfers that carry rows of this rank."""

Part = tuple[int, int]
"""Number of a transfer, and the rank whose rows it carries."""


@dataclass
class _Received:
    """What has arrived of one part.

    Attributes:
        count: number of rows in all pieces; negative before the first piece arrives.
        pieces: the frames of the arrived pieces by number.
        missing: number of rows that have not arrived.
    """

    count: int = -1
    pieces: dict[int, memoryview] = field(default_factory=dict)
    missing: int = -1

    @property
    def complete(self) -> bool:
        return self.missing == 0


@dataclass
class _Step:
    """One step: the parts of the other ranks, and the number of these and of frames that are still under way."""

    parts: dict[Part, _Received]
    open: int


class RowGatherExchange(TransportSteps, RowExchange):
    """Rows of every rank along trees that start there.

    A rank that has all rows of a step may begin the next one, while others still wait for rows of this step. None gets
    further ahead, because it needs rows of all ranks. So frames belong to the current step or to the next one.

    Args:
        transport: connections to the peers on the trees.
        channel: number of this exchange in frames, the same on all ranks.
        rank: this rank in the schedule.
        message: a row-wise message with `RowBroadcast` transfers.
        width: elements per row.
        dtype: type of the elements.
        timeout: seconds to wait for other ranks.
    """

    def __init__(
        self,
        transport: Transport,
        channel: int,
        rank: int,
        message: Message,
        width: int,
        dtype: torch.dtype,
        timeout: float,
    ) -> None:
        super().__init__(transport, channel, message, timeout)
        self._rank = rank
        self._width = width
        self._dtype = dtype
        self._table = message.rows
        self._elements = message.numel
        self._index_bytes = index_bytes(message.rows)
        self._row_bytes = self._index_bytes + width * dtype.itemsize
        self._transfers = [one for one in message.rounds[0].transfers if isinstance(one, RowBroadcast)]
        self._ranks = len(self._transfers[0].trees)
        self._incoming: dict[tuple[int, Frame], memoryview] = {}
        self._own: Rows | None = None
        self._current, self._next = self._new_step(), self._new_step()
        transport.register(channel, self)

    def _new_step(self) -> _Step:
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        parts = {(number, rank): _Received() for number in range(len(self._transfers)) for rank in others}
        return _Step(parts, len(parts))

    def start(self, rows: Rows) -> None:
        self._own = rows
        shares = self._shares(rows)
        frames = [
            (number, piece, self._pack(share, piece * length, (piece + 1) * length, len(shares)))
            for number, (share, length) in enumerate(shares)
            for piece in range(max(1, -(-share.indices.numel() // length)))
        ]
        self._launch(lambda: self._begin(frames))

    def wait(self) -> Rows:
        self._completion.wait()
        assert self._own is not None
        parts = [self._rows_of(rank) if rank != self._rank else self._own for rank in range(self._ranks)]
        with profiled(self._name, "reduce"):
            total = add_rows(parts)
        # The sum holds what it needs; the frames of all ranks would otherwise stay in memory until the next step.
        self._own = None
        for part in self._current.parts.values():
            part.pieces.clear()
        return total

    def _shares(self, rows: Rows) -> list[tuple[Rows, int]]:
        """The rows that each transfer takes that carries rows, and the rows of a piece."""
        count = rows.indices.numel()
        used = used_broadcasts(self._transfers, count * self._row_bytes)
        edges = [round(count * part) for part in accumulate((part for _, part in used), initial=0.0)]
        return [
            (
                Rows(rows.indices[first:last], rows.values[first:last], rows.gradients),
                max(1, transfer.segment // self._width),
            )
            for (transfer, _), (first, last) in zip(used, pairwise(edges), strict=True)
        ]

    def _pack(self, share: Rows, start: int, stop: int, used: int) -> memoryview:
        """The frame of rows ``[start, stop)`` of a share, where ``used`` transfers carry rows."""
        piece = Rows(share.indices[start:stop], share.values[start:stop], share.gradients)
        return byte_view(piece.packed(self._table, share.gradients, share.indices.numel(), used))

    def _begin(self, frames: list[tuple[int, int, memoryview]]) -> None:
        self._current, self._next = self._next, self._new_step()
        children = [self._children(number, self._rank) for number in range(len(self._transfers))]
        self._current.open += sum(len(children[number]) for number, _, _ in frames)
        if not self._enter_step(self._current.open):
            return
        for number, piece, wire in frames:
            place = number * self._ranks + self._rank
            frame = Frame(self._channel, self._step, place, piece, DOWN, len(wire))
            for child in children[number]:
                self._pass_on(child, self._current, frame, wire)

    def destination(self, peer: int, frame: Frame) -> memoryview:
        part = self._part(peer, frame)
        count, rest = divmod(frame.size - _HEADER.size, self._row_bytes)
        if rest or count < 0 or count > self._table:
            raise ExchangeError(f"rank {peer} sent {frame.size} bytes of rows, which fit no part of this table")
        if part.complete or frame.piece in part.pieces:
            raise ExchangeError(f"rank {peer} sent the same rows twice")
        wire = self._incoming[peer, frame] = memoryview(bytearray(frame.size))
        return wire

    def arrived(self, peer: int, frame: Frame) -> None:
        with profiled(self._name, "broadcast"):
            self._take(peer, frame, self._incoming.pop((peer, frame)))

    def _take(self, peer: int, frame: Frame, wire: memoryview) -> None:
        """Keep rows that have arrived, and pass them on."""
        part, step = self._part(peer, frame), self._step_of(peer, frame)
        _, count, used = _HEADER.unpack_from(wire)
        number, source = divmod(frame.transfer, self._ranks)
        if part.missing == 0 or not number < used <= len(self._transfers):
            raise ExchangeError(
                f"rank {peer} sent rows of rank {source} in transfer {number + 1} and says that {used} transfers carry "
                f"them; allowed: {number + 1} to {len(self._transfers)}, the same in all frames"
            )
        self._add(peer, part, frame.piece, wire, count)
        children = self._children(number, source)
        step.open += len(children)
        if step is self._current:
            self._open += len(children)
        for child in children:
            self._pass_on(child, step, frame, wire)
        if part.complete:
            self._settle(step)
        for further in range(used, len(self._transfers)):
            if (unused := step.parts[further, source]).count < 0:
                unused.count = unused.missing = 0
                self._settle(step)

    def _add(self, peer: int, part: _Received, piece: int, wire: memoryview, count: int) -> None:
        arrived = (len(wire) - _HEADER.size) // self._row_bytes
        if part.count < 0:
            part.count = part.missing = count
        if count != part.count or arrived > part.missing:
            raise ExchangeError(f"rank {peer} sent rows that fit no part of this table")
        part.pieces[piece] = wire
        part.missing -= arrived

    def _step_of(self, peer: int, frame: Frame) -> _Step:
        if frame.step == self._step:
            return self._current
        self._check_step(peer, frame, self._step + 1)
        return self._next

    def _part(self, peer: int, frame: Frame) -> _Received:
        number, source = divmod(frame.transfer, self._ranks)
        if number >= len(self._transfers) or self._transfers[number].trees[source].parents[self._rank] != peer:
            raise ExchangeError(f"rank {peer} sent rows that are not in the schedule")
        return self._step_of(peer, frame).parts[number, source]

    def _children(self, number: int, source: int) -> list[Peer]:
        """Those to whom this rank passes on the rows of ``source`` in a transfer."""
        tree = self._transfers[number].trees[source]
        return [Peer(child, tree.interface) for child in tree.children[self._rank]]

    def _pass_on(self, peer: Peer, step: _Step, frame: Frame, wire: memoryview) -> None:
        urgency = (-self._priority, self._channel, float(frame.piece))
        self._transport.send(peer, frame, wire, urgency, partial(self._settle, step))

    def _settle(self, step: _Step) -> None:
        """Count a part that is complete or a frame that was sent."""
        step.open -= 1
        if step is self._current:
            self._progress()

    def _rows_of(self, rank: int) -> Rows:
        """The rows of another rank, put together again."""
        values, indices, gradients = [], [], 0
        for number in range(len(self._transfers)):
            for _, wire in sorted(self._current.parts[number, rank].pieces.items()):
                gradients, _, _ = _HEADER.unpack_from(wire)
                start = len(wire) - (len(wire) - _HEADER.size) // self._row_bytes * self._index_bytes
                values.append(numpy.frombuffer(wire[_HEADER.size : start], numpy.uint8))
                indices.append(numpy.frombuffer(wire[start:], f"u{self._index_bytes}"))
        elements = torch.from_numpy(values[0] if len(values) == 1 else numpy.concatenate(values)).view(self._dtype)
        found = numpy.concatenate(indices).astype(numpy.int64)
        if len(found) and (found[0] < 0 or found[-1] >= self._table or (found[1:] <= found[:-1]).any()):
            raise ExchangeError(f"rank {rank} sent rows that fit no part of this table")
        return Rows(torch.from_numpy(found), elements.view(len(found), self._width), gradients)
