"""Frames between pairs of ranks, moved by one thread per process.

Collectives run in a fixed order and block on their slowest member. Trees need many messages in flight, and each piece
is forwarded as soon as it is complete, urgent ones first. Frames therefore travel over plain non-blocking sockets. One
thread receives, reduces and forwards them while backward computes.
"""

from __future__ import annotations

import atexit
import heapq
import math
import selectors
import socket
import struct
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from lightning_autosync.engine.connections import Blocks, limit_queue, over, tune_connection
from lightning_autosync.errors import ExchangeError
from lightning_autosync.plan.pacing import Need

_HEADER = struct.Struct("<IIIIIQ")
_TURN = 512 * 1024
"""Bytes sent to one peer before the other peers get their turn."""
_CLOSING_TIMEOUT = 5.0
"""Longest time in seconds that closing takes to send the last frames."""
_TUNED_STEPS = 3
"""First steps before each of which a connection's queue is limited, by the round trips of the steps before."""
UP, DOWN, LEAVE = 0, 1, 2
"""Phases of a frame: towards the root or from one root to the other, away from the root, and a rank's last frame, with
its last complete step."""


class Frame(NamedTuple):
    """The header of a frame, which carries one piece of a transfer up or down its tree; ``size`` is in bytes.

    Between pairs of ranks, ``transfer`` is the number of the piece, and ``piece`` that of the exchange.
    """

    channel: int
    step: int
    transfer: int
    piece: int
    phase: int
    size: int


class Receiver(Protocol):
    """The part of an exchange that the transport calls. All methods run on the transport's thread."""

    def destination(self, peer: int, frame: Frame) -> memoryview:
        """The memory for the frame's payload, exactly ``frame.size`` bytes."""

    def arrived(self, peer: int, frame: Frame) -> None:
        """Called when the frame's payload is in place."""

    def failed(self, error: ExchangeError) -> None:
        """Called when no further frame will come."""

    def left(self, peer: int, step: int) -> None:
        """Called when a peer leaves; ``step`` is the last step in which it takes part."""

    @property
    def completed(self) -> int:
        """The last step that this rank has completed."""


_Outgoing = tuple[tuple[float, ...], list[memoryview], Callable[[], None] | None]
"""A frame to send: a unique key by which frames are sorted, the bytes that are left, and what to call after them."""


class Peer(NamedTuple):
    """A rank, and the interface of both nodes over which it is connected (0 for the first)."""

    rank: int
    interface: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank}{over(self.interface)}"


class _Connection:
    """One connection, with an outbox sorted by urgency and the frame that is being received."""

    def __init__(
        self,
        peer: Peer,
        connection: socket.socket,
        rates: tuple[float, float] | None = None,
        need: Need | None = None,
    ) -> None:
        self.peer = peer
        self.rank = peer.rank
        self.socket = connection
        self.rates = rates
        self.need = need
        self.blocks = Blocks(None)
        self.tuned = 1
        self.outbox: list[_Outgoing] = []
        self.outgoing: _Outgoing | None = None
        self.watching_writes = False
        self.header = memoryview(bytearray(_HEADER.size))
        self.frame: Frame | None = None
        self.pending = self.header
        self.left = False

    @property
    def idle(self) -> bool:
        """Whether the kernel has accepted all queued frames."""
        return self.outgoing is None and not self.outbox


class Transport:
    """Connections to peers and the thread that serves them.

    Args:
        sockets: connected stream sockets by peer; the transport owns them from now on.
        rates: bytes/s of the route to each peer and of the route back, where known (see `tune_connection`).
        needs: what connections need of routes that they share, where known (see `sending_needs`).
    """

    def __init__(
        self,
        sockets: Mapping[Peer, socket.socket],
        rates: Mapping[Peer, tuple[float, float]] | None = None,
        needs: Mapping[Peer, Need] | None = None,
    ) -> None:
        self.bytes_sent = 0
        self._selector = selectors.DefaultSelector()
        known, needed = rates or {}, needs or {}
        self._peers = {peer: _Connection(peer, one, known.get(peer), needed.get(peer)) for peer, one in sockets.items()}
        self._receivers: dict[int, Receiver] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._unwritten: dict[Peer, _Connection] = {}
        self._counter = 0
        self._error: ExchangeError | None = None
        self._closing = False
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        for peer in self._peers.values():
            peer.blocks.size = tune_connection(peer.socket, peer.rates, peer.need)
            self._selector.register(peer.socket, selectors.EVENT_READ, peer)
        self._thread = threading.Thread(target=self._serve, name="autosync-transport", daemon=True)
        self._thread.start()
        # A script may end without closing the engine, but peers that lag behind still need the queued frames.
        atexit.register(self.close)

    def register(self, channel: int, receiver: Receiver) -> None:
        """Deliver a channel's frames to ``receiver``. Call this before any peer may send on the channel."""
        self._receivers[channel] = receiver

    def submit(self, call: Callable[[], None]) -> None:
        """Run ``call`` on the transport's thread. Call this from any thread."""
        self._calls.append(call)
        self._wake.send(b"\0")

    def send(
        self,
        peer: Peer,
        frame: Frame,
        payload: memoryview,
        urgency: tuple[float, ...],
        sent: Callable[[], None] | None = None,
    ) -> None:
        """Queue a frame; frames with the lowest ``urgency`` leave first. Call this on the transport's thread only.

        ``payload`` must not change until ``sent`` is called.

        Raises:
            ExchangeError: the connection to ``peer`` is closed.
        """
        # The counter keeps frames of equal urgency in order.
        self._counter += 1
        header = memoryview(_HEADER.pack(*frame))
        if peer not in self._peers:
            raise self._error or ExchangeError(f"{peer} has left")
        connection = self._peers[peer]
        if connection.tuned < frame.step <= _TUNED_STEPS:
            connection.tuned = frame.step
            connection.blocks.size = limit_queue(connection.socket, connection.rates, connection.need)
        heapq.heappush(connection.outbox, ((*urgency, self._counter), [header, payload], sent))
        if not connection.watching_writes:
            self._unwritten[peer] = connection

    @property
    def error(self) -> ExchangeError | None:
        """The error that broke the transport; None while it works."""
        return self._error

    def close(self) -> None:
        """Send queued frames, tell the peers that this rank leaves, stop the thread and close all connections.

        Peers can still complete the exchanges that this rank has completed.
        """
        atexit.unregister(self.close)
        if self._closing:
            return
        self.submit(self._say_goodbye)
        self._thread.join()
        for connection in [peer.socket for peer in self._peers.values()] + [self._wake, self._woken]:
            connection.close()
        self._selector.close()
        self._receivers.clear()  # which refer to this transport, so that their buffers would stay

    def _serve(self) -> None:
        deadline = math.inf
        while not self._closing or (self._busy() and time.monotonic() < deadline):
            try:
                for key, events in self._selector.select(_CLOSING_TIMEOUT if self._closing else None):
                    self._handle(key.data, events)
                self._flush()
            except ExchangeError as error:
                self._fail(error)
            except Exception as cause:
                # Any other error must reach the main thread too, which would otherwise wait until its timeout.
                self._fail(ExchangeError(f"the exchange failed: {cause}\n{traceback.format_exc()}"))
            if self._closing and deadline == math.inf:
                deadline = time.monotonic() + _CLOSING_TIMEOUT

    def _busy(self) -> bool:
        return not all(peer.idle for peer in self._peers.values())

    def _handle(self, peer: _Connection | None, events: int) -> None:
        if peer is None:
            self._run_calls()
        elif peer.peer in self._peers:  # an earlier event of the same select call may have dropped the peer
            if events & selectors.EVENT_READ:
                try:
                    self._read(peer)
                except OSError as cause:
                    self._lose(peer, str(cause))
            if events & selectors.EVENT_WRITE:
                self._unwritten[peer.peer] = peer

    def _say_goodbye(self) -> None:
        self._closing = True
        for channel, receiver in self._receivers.items():
            frame = Frame(channel, receiver.completed, 0, 0, LEAVE, 0)
            for peer, connection in self._peers.items():
                if not connection.left:
                    self.send(peer, frame, memoryview(b""), (math.inf,))

    def _run_calls(self) -> None:
        try:
            while self._woken.recv(4096):
                pass
        except BlockingIOError:
            pass
        while self._calls:
            self._calls.popleft()()

    def _flush(self) -> None:
        """Write to the peers that have new frames. Only once per round, so that urgent frames overtake others."""
        while self._unwritten:
            _, peer = self._unwritten.popitem()
            if peer.peer in self._peers:
                self._write(peer)

    def _read(self, peer: _Connection) -> None:
        # At most a few frames, then other peers get their turn.
        for _ in range(8):
            # With the end of a frame comes the header of the next one, which saves a system call per frame.
            buffers = [peer.pending] if peer.frame is None else [peer.pending, peer.header]
            try:
                count = peer.socket.recvmsg_into(buffers)[0]
            except BlockingIOError:
                return
            if count == 0:
                self._lose(peer, "it closed the connection")
                return
            if self._advance(peer, count):
                return

    def _advance(self, peer: _Connection, count: int) -> bool:
        """Account for ``count`` received bytes; returns whether no more have arrived."""
        rest = count - len(peer.pending)
        if rest < 0:
            peer.pending = peer.pending[count:]
            return True
        if peer.frame is not None:
            self._deliver(peer)
            peer.pending = peer.header[rest:]
            if peer.pending:
                return True
        self._open(peer, Frame(*_HEADER.unpack(peer.header)))
        if not peer.pending:
            self._deliver(peer)
        return False

    def _open(self, peer: _Connection, frame: Frame) -> None:
        """Choose the memory for the payload after a header has arrived."""
        peer.frame = frame
        receiver = self._receivers.get(frame.channel)
        if receiver is None:
            raise ExchangeError(f"rank {peer.rank} sent to channel {frame.channel}, which is not in the schedule")
        peer.pending = memoryview(b"") if frame.phase == LEAVE else receiver.destination(peer.rank, frame)

    def _deliver(self, peer: _Connection) -> None:
        """Pass a complete frame to its receiver."""
        assert peer.frame is not None
        frame, peer.frame = peer.frame, None
        peer.pending = peer.header
        if frame.phase == LEAVE:
            peer.left = True
            self._receivers[frame.channel].left(peer.rank, frame.step)
        else:
            self._receivers[frame.channel].arrived(peer.rank, frame)

    def _write(self, peer: _Connection) -> None:
        turn_ends = self.bytes_sent + _TURN
        while self.bytes_sent < turn_ends:
            if peer.outgoing is None:
                if not peer.outbox:
                    self._watch_writes(peer, False)
                    return
                peer.outgoing = heapq.heappop(peer.outbox)
            _, buffers, sent = peer.outgoing
            try:
                count = peer.blocks.send(peer.socket, buffers)
            except BlockingIOError:
                self._watch_writes(peer, True)
                return
            except OSError as cause:
                self._lose(peer, str(cause))
                return
            self.bytes_sent += count
            while buffers and count >= len(buffers[0]):
                count -= len(buffers.pop(0))
            if buffers:
                buffers[0] = buffers[0][count:]
            else:
                peer.outgoing = None
                if sent is not None:
                    sent()
        self._watch_writes(peer, True)

    def _watch_writes(self, peer: _Connection, wanted: bool) -> None:
        if peer.watching_writes != wanted:
            peer.watching_writes = wanted
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
            self._selector.modify(peer.socket, events, peer)

    def _lose(self, peer: _Connection, why: str) -> None:
        if peer.left or self._closing:
            self._drop(peer)
            return
        self._fail(ExchangeError(f"lost the connection to {peer.peer}: {why}"))

    def _fail(self, error: ExchangeError) -> None:
        """Fail all exchanges. Other ranks notice by their lost connections."""
        self._error = self._error or error
        for peer in list(self._peers.values()):
            self._drop(peer)
        for receiver in self._receivers.values():
            receiver.failed(self._error)

    def _drop(self, peer: _Connection) -> None:
        self._selector.unregister(peer.socket)
        peer.socket.close()
        del self._peers[peer.peer]
