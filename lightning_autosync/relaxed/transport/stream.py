"""Messages to and from one peer, over a connection that may be replaced without losing or repeating messages.

Messages are sent as frames. A small message is a single frame and overtakes pieces of large ones, so that bulk
transfers do not delay decisions. Frames are numbered implicitly, in the order of writing. The receiver confirms the
number of frames that it has; after a reconnection, the sender repeats the rest.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lightning_autosync.errors import ExchangeError
from lightning_autosync.relaxed.transport.heartbeat import SilenceLimit
from lightning_autosync.relaxed.transport.messages import (
    LARGEST_HEADER,
    Mail,
    OutgoingMessage,
    Sent,
    cut,
    header_fault,
    payload_size,
)

_HEAD = struct.Struct("<BIQ")
"""A frame's type and two sizes (or a count); see below."""

_SMALL, _LARGE, _PIECE, _BEAT, _LEAVE = range(5)
"""
SMALL: a complete message. Sizes of its JSON head and of its payload, which both follow.
LARGE: the head of a large message. Sizes of its JSON head, which follows, and of its payload.
PIECE: the next bytes of the current large message.
BEAT: number of frames that the sender of the beat has received; the only frame that is not numbered.
LEAVE: the last frame before the peer closes.
"""

SMALL_MESSAGE = 64 * 1024
"""Largest payload in bytes of a small message, which is copied, sent in one frame, and overtakes large ones."""

PIECE = 256 * 1024
"""Bytes per piece of a large message; small messages may pass between pieces."""

Place = Callable[[str, dict[str, Any], int], memoryview | None]
"""Returns memory for a large payload, from kind, header and size; None if the stream shall allocate it."""


class ProtocolError(ExchangeError):
    """The peer sent data that violates the protocol."""


class _Frame(NamedTuple):
    buffers: tuple[memoryview, ...]
    sent: Sent | None
    """The message to which this frame belongs, if its confirmation settles or moves that message."""
    last: bool = True
    """Whether the frame completes that message."""


class _Inbound(NamedTuple):
    kind: str
    header: dict[str, Any]
    payload: memoryview


class FrameStream:
    """Frames to and from one peer. Used by the mesh's thread only.

    Args:
        place: called for the memory of each large payload.
        deliver: called with each complete message.
        largest: limit on the payload of a message in bytes.

    Attributes:
        received: number of frames received from the peer.
        beat_due: whether to send a beat next.
        peer_left: whether the peer has taken leave.
    """

    def __init__(self, peer: int, place: Place, deliver: Callable[[Mail], None], largest: int) -> None:
        self.peer = peer
        self.received = 0
        self.beat_due = False
        self.peer_left = False
        self._beaten = False
        self._place, self._deliver, self._largest = place, deliver, largest
        self._small: deque[OutgoingMessage] = deque()
        self._large: deque[OutgoingMessage] = deque()
        self._pieces: Iterator[_Frame] = iter(())
        self._leave = False
        self._confirmed = 0
        self._unconfirmed: deque[_Frame] = deque()
        self._repeat: deque[_Frame] = deque()
        self._writing: list[memoryview] = []
        self._inbound: _Inbound | None = None
        self._filled = 0
        self._head = bytearray(_HEAD.size)
        self._body: memoryview | None = None
        self._pending = memoryview(self._head)

    # Sending

    def post(self, message: OutgoingMessage) -> None:
        """Queue a message; the payload of a small message is copied, so it may change at once."""
        if payload_size(message.payload) <= SMALL_MESSAGE:
            copy = memoryview(b"".join(message.payload))
            self._small.append(message._replace(payload=[copy]))
            message.sent.settle()
        else:
            self._large.append(message)

    def leave(self) -> None:
        """Take leave after all queued messages."""
        self._leave = True

    @property
    def idle(self) -> bool:
        """Whether the peer has confirmed all messages."""
        waiting = self._small or self._large or self._unconfirmed or self._writing or self._leave
        return not waiting

    def write(self, connection: socket.socket, most: int) -> tuple[int, bool]:
        """Write about ``most`` bytes; returns the number of bytes written, and whether there is more to write.

        Raises:
            OSError: the connection broke.
        """
        total = 0
        while total < most:
            if not self._writing and not self._next_frame():
                return total, False
            try:
                count = connection.sendmsg(self._writing)
            except BlockingIOError:
                return total, True
            total += count
            while self._writing and count >= self._writing[0].nbytes:
                count -= self._writing.pop(0).nbytes
            if self._writing:
                self._writing[0] = self._writing[0][count:]
        return total, True

    def resume(self, peer_received: int) -> None:
        """Continue over a new connection; repeat all frames after the first ``peer_received``.

        Raises:
            ProtocolError: the peer cannot have this number of frames.
        """
        self._confirm(peer_received)
        self._repeat = deque(self._unconfirmed)
        self._writing = []
        self._begin_head()

    def abandon(self, error: ExchangeError) -> None:
        """Send nothing more: all unconfirmed messages fail with ``error``."""
        for message in (*self._small, *self._large):
            message.sent.settle(error)
        for frame in (*self._pieces, *self._unconfirmed):
            if frame.sent is not None:
                frame.sent.settle(error)
        for queue in (self._small, self._large, self._unconfirmed, self._repeat):
            queue.clear()
        self._writing, self._leave = [], False

    def _next_frame(self) -> bool:
        if self.beat_due:
            self.beat_due = False
            self._writing = [memoryview(_HEAD.pack(_BEAT, 0, self.received))]
            return True
        if self._repeat:
            self._writing = list(self._repeat.popleft().buffers)
            return True
        frame = self._new_frame()
        if frame is None:
            return False
        self._unconfirmed.append(frame)
        self._writing = list(frame.buffers)
        return True

    def _new_frame(self) -> _Frame | None:
        if self._small:
            message = self._small.popleft()
            return _opening(_SMALL, message, message.payload)
        piece = next(self._pieces, None)
        if piece is not None:
            return piece
        while self._large:
            message = self._large.popleft()
            if message.sent.cancelled:
                message.sent.settle()
                continue
            self._pieces = _piece_frames(message)
            return _opening(_LARGE, message, [])
        if self._leave:
            self._leave = False
            return _Frame((memoryview(_HEAD.pack(_LEAVE, 0, 0)),), None)
        return None

    def _confirm(self, received: int) -> None:
        if not self._confirmed <= received <= self._confirmed + len(self._unconfirmed):
            raise ProtocolError(
                f"rank {self.peer} confirmed {received} frames; expected {self._confirmed} to "
                f"{self._confirmed + len(self._unconfirmed)}"
            )
        while self._confirmed < received:
            frame = self._unconfirmed.popleft()
            self._confirmed += 1
            if frame.sent is not None:
                frame.sent.settle() if frame.last else frame.sent.move()

    # Receiving

    def read(self, connection: socket.socket, most: int) -> int:
        """Read about ``most`` bytes and return their number. Data from before a break is handled before the break.

        Raises:
            OSError: the connection broke, and no data was left; ConnectionResetError if the peer closed it.
            ProtocolError: the peer violated the protocol.
        """
        total = 0
        while total < most:
            try:
                count = connection.recv_into(self._pending)
            except BlockingIOError:
                break
            except OSError:
                if total:
                    break  # the next call raises it again
                raise
            if count == 0 and total:
                break
            if count == 0:
                raise ConnectionResetError("it closed the connection")
            total += count
            self._pending = self._pending[count:]
            if not self._pending:
                self._advance()
        return total

    @property
    def beaten(self) -> bool:
        """Whether a beat came since the last access, which resets this."""
        beaten, self._beaten = self._beaten, False
        return beaten

    def _begin_head(self) -> None:
        self._body, self._pending = None, memoryview(self._head)

    def _advance(self) -> None:
        """Handle a complete head or body of a frame."""
        kind, first, second = _HEAD.unpack(self._head)
        if self._body is None:
            self._body = self._destination(kind, first, second)
            self._pending = self._body
            if self._body.nbytes:
                return
        body = self._body
        self._begin_head()
        if kind == _BEAT:
            self._beaten = True
            self._confirm(second)
            return
        self.received += 1
        self._complete(kind, first, second, body)

    def _destination(self, kind: int, first: int, second: int) -> memoryview:
        if kind in (_SMALL, _LARGE):
            most = SMALL_MESSAGE if kind == _SMALL else self._largest
            if first > LARGEST_HEADER or second > most:
                raise ProtocolError(
                    f"rank {self.peer} announced a message of {first} + {second} bytes, which is too large"
                )
            return memoryview(bytearray(first + (second if kind == _SMALL else 0)))
        if kind == _PIECE:
            if self._inbound is None or second > self._inbound.payload.nbytes - self._filled:
                raise ProtocolError(f"rank {self.peer} sent a piece of {second} bytes that belongs to no message")
            return self._inbound.payload[self._filled : self._filled + second]
        if kind in (_BEAT, _LEAVE):
            return memoryview(b"")
        raise ProtocolError(f"rank {self.peer} sent a frame of unknown type {kind}")

    def _complete(self, kind: int, first: int, second: int, body: memoryview) -> None:
        if kind == _SMALL:
            name, header = self._parse(body[:first])
            # A copy, so that the payload is aligned for tensors.
            self._deliver(Mail(self.peer, name, header, memoryview(bytearray(body[first:]))))
        elif kind == _LARGE:
            if self._inbound is not None:
                raise ProtocolError(f"rank {self.peer} began a message before the previous one was complete")
            name, header = self._parse(body)
            self._inbound = _Inbound(name, header, self._room(name, header, second))
            self._filled = 0
        elif kind == _PIECE:
            self._filled += second
            self._finish_large()
        else:
            self.peer_left = self.beat_due = True

    def _finish_large(self) -> None:
        assert self._inbound is not None
        if self._filled == self._inbound.payload.nbytes:
            inbound, self._inbound = self._inbound, None
            # Confirm at once, because the sender may wait to change its buffer.
            self.beat_due = True
            self._deliver(Mail(self.peer, *inbound))

    def _room(self, kind: str, header: dict[str, Any], size: int) -> memoryview:
        place = self._place(kind, header, size)
        if place is None:
            return self._new_room(size)
        if place.nbytes != size:
            raise ProtocolError(f"rank {self.peer} sent {size} bytes of {kind!r} where {place.nbytes} were expected")
        return place.cast("B")

    def _new_room(self, size: int) -> memoryview:
        """Memory for ``size`` bytes. The system provides pages only as data arrives, so a large claim costs nothing."""
        try:
            return np.empty(size, dtype=np.uint8).data
        except MemoryError:
            raise ProtocolError(f"rank {self.peer} announced {size} bytes, which do not fit into memory") from None

    def _parse(self, text: memoryview) -> tuple[str, dict[str, Any]]:
        try:
            kind, header = json.loads(bytes(text))
        except (ValueError, TypeError, RecursionError) as cause:
            raise ProtocolError(f"rank {self.peer} sent a message whose header is not valid JSON: {cause}") from None
        if not isinstance(kind, str) or not isinstance(header, dict):
            raise ProtocolError(f"rank {self.peer} sent a message without a kind or a header")
        if fault := header_fault(kind, header):
            raise ProtocolError(f"rank {self.peer} sent a message of kind {kind!r} with an invalid header: {fault}")
        return kind, header


def _opening(kind: int, message: OutgoingMessage, payload: list[memoryview]) -> _Frame:
    head = _HEAD.pack(kind, len(message.head), payload_size(message.payload))
    return _Frame((memoryview(head + message.head), *payload), None)


def _piece_frames(message: OutgoingMessage) -> Iterator[_Frame]:
    left = payload_size(message.payload)
    for piece in cut(message.payload, PIECE):
        size = payload_size(piece)
        left -= size
        yield _Frame((memoryview(_HEAD.pack(_PIECE, 0, size)), *piece), message.sent, last=not left)


FORGIVEN = 5
"""Absences of this process in a row that excuse a peer's silence. A live peer is heard soon after each of them."""


@dataclass(eq=False)
class Connection:
    """A live peer: its stream of frames, its current socket, and its last sign of life. Times are monotonic seconds."""

    stream: FrameStream
    limit: SilenceLimit
    address: tuple[str, int]
    sock: socket.socket | None = None
    heard: float = 0.0
    deadline: float = math.inf
    """Time to give up a broken connection that is not replaced, or to close the connection of a peer that has left."""
    watching_writes: bool = False
    disputed: bool = False
    """Whether this process cannot hear the peer, which has a lower rank, and has asked other peers whether they can."""
    silent_from: float | None = None
    """Time of the last sign of life before the silence for which the connection is being replaced."""
    _absences: int = 0

    def attach(self, sock: socket.socket, now: float) -> None:
        """Continue over ``sock``; a beat is due at once."""
        self.sock, self.heard, self.disputed, self.watching_writes = sock, now, False, False
        self.limit.pause()
        self.stream.beat_due = True

    def hear(self, now: float) -> None:
        """Note data from the peer."""
        self.heard, self.silent_from, self._absences = now, None, 0
        if not self.stream.peer_left:
            self.deadline = math.inf

    def forgive(self, absence: float) -> None:
        """Do not count ``absence`` seconds, in which this process itself was stopped, as silence of the peer."""
        self._absences += 1
        if self._absences <= FORGIVEN:
            self.heard += absence
            self.deadline += absence
            self.limit.pause()

    def too_silent(self, now: float) -> bool:
        return now - self.heard > self.limit.seconds and not self.stream.peer_left
