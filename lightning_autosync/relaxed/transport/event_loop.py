"""The thread that serves a mesh's connections: it reads, writes, and runs calls from other threads."""

from __future__ import annotations

import math
import selectors
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from lightning_autosync.engine.authentication import Acceptor
from lightning_autosync.errors import ExchangeError
from lightning_autosync.relaxed.transport.connections import ALIVE, LOST, SUSPECT, Connections, MeshEvents
from lightning_autosync.relaxed.transport.heartbeat import HeartbeatSettings
from lightning_autosync.relaxed.transport.membership import Membership
from lightning_autosync.relaxed.transport.messages import Mail, OutgoingMessage
from lightning_autosync.relaxed.transport.stream import Connection, ProtocolError


class CallQueue:
    """A queue of calls, with a socket that is readable while calls are queued.

    Attributes:
        readable: the socket; the thread that calls `run_all` watches it.
    """

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._awake = self._closed = False
        self._submitting = threading.Lock()
        self._wake, self.readable = socket.socketpair()
        self.readable.setblocking(False)

    def submit(self, call: Callable[[], None]) -> None:
        """Queue a call. Call this from any thread.

        Raises:
            ExchangeError: the queue is closed.
        """
        with self._submitting:
            if self._closed:
                raise ExchangeError("the mesh is closed")
            self._calls.append(call)
            self._rouse()

    def run_all(self) -> None:
        """Run all queued calls; if one raises, the thread wakes again for the calls after it."""
        try:
            while self.readable.recv(4096):
                pass
        except BlockingIOError:
            pass
        # Reset before the calls run, so that a call that is queued meanwhile wakes the thread again.
        self._awake = False
        try:
            while self._calls:
                self._calls.popleft()()
        finally:
            if self._calls:  # other threads may wait for these calls
                self._rouse()

    def _rouse(self) -> None:
        if not self._awake:
            self._awake = True
            self._wake.send(b"\0")

    def close(self) -> list[Callable[[], None]]:
        """Accept no more calls.

        Returns:
            The queued calls that have not run.
        """
        with self._submitting:
            self._closed = True
            self._wake.close()
            self.readable.close()
            left = list(self._calls)
            self._calls.clear()
        return left


_TURN = 512 * 1024
"""Bytes read from or written to one peer before the other peers get their turn."""


class EventLoop:
    """Serves the connections of one process of a mesh.

    Args:
        listener: a listening socket whose address the peers know; owned by the loop.
        largest: limit on the payload of a message in bytes.
    """

    def __init__(
        self,
        members: Membership,
        listener: socket.socket,
        secret: bytes,
        settings: HeartbeatSettings,
        events: MeshEvents,
        largest: int,
    ) -> None:
        self.bytes_sent = 0
        self._members, self._settings, self._events = members, settings, events
        self._calls = CallQueue()
        self._selector = selectors.DefaultSelector()
        self._address = listener.getsockname()[:2]
        self._connections = Connections(
            members,
            settings,
            events,
            self._calls.submit,
            self._selector,
            secret,
            self._address,
            largest,
            self._delivered,
        )
        self._acceptor = Acceptor(listener, self._selector, secret, settings.redial, self._connections.answer)
        self._tick_at = self._looked_at = time.monotonic()
        self._selector.register(self._calls.readable, selectors.EVENT_READ, self._calls.run_all)
        self._thread = threading.Thread(target=self._serve, name="autosync-mesh", daemon=True)
        self._thread.start()

    # For any thread

    @property
    def error(self) -> ExchangeError | None:
        """The error that ended the mesh; None while it works."""
        return self._connections.error

    def submit(self, call: Callable[[], None]) -> None:
        """Run ``call`` on the loop's thread."""
        self._calls.submit(call)

    def perform(self, call: Callable[[], None]) -> None:
        """Run ``call`` on the loop's thread and wait until it has run, or until the loop is closed."""
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            call()
            return
        done = threading.Event()
        self.submit(call)
        self.submit(done.set)
        while not done.wait(0.1) and self._thread.is_alive():
            pass

    def post(self, peer: int, message: OutgoingMessage) -> None:
        """Queue a message; it fails if the peer is gone."""
        self.submit(partial(self._connections.post, peer, message))

    def join(self, peer: int, address: tuple[str, int], incarnation: int, timeout: float) -> None:
        """Connect to a peer for the first time, on a separate thread; `MeshEvents.joined` is called afterwards."""
        self._connections.join(peer, address, incarnation, timeout)

    def refuse(self, peer: int, why: str) -> None:
        """Give up a peer that sent what cannot be used; on the loop's thread only."""
        if self._members.is_live(peer):
            self._connections.give_up(peer, why, dead=True)

    def close(self) -> None:
        """Send queued messages, take leave, stop the thread and close all connections."""
        if self._thread.is_alive():
            self.submit(self._connections.take_leave)
            self._thread.join()
        self._connections.stop()
        # Calls that came too late for the thread: they settle messages and close new connections.
        for call in self._calls.close():
            with suppress(ExchangeError):
                call()
        self._connections.close()
        self._acceptor.close()
        self._selector.close()

    # The loop

    def _serve(self) -> None:
        while self._connections.closing == math.inf or not self._connections.finished:
            try:
                events = self._selector.select(max(0.0, self._tick_at - time.monotonic()))
                self._forgive_own_absence()
                for key, mask in events:
                    self._attend(key.fileobj, key.data, mask)
                self._flush()
                if time.monotonic() >= self._tick_at:
                    self._tick()
            except Exception as cause:
                self._connections.fail(ExchangeError(f"the mesh failed: {cause}\n{traceback.format_exc()}"))

    def _attend(self, source: object, handler: Callable[[], None] | int, mask: int) -> None:
        if not isinstance(handler, int):
            handler()
            return
        connection = self._connections.by_rank.get(handler)
        if connection is not None and connection.sock is source:
            if mask & selectors.EVENT_READ:
                self._read(handler, connection)
            if mask & selectors.EVENT_WRITE:
                self._connections.unwritten.add(handler)

    def _forgive_own_absence(self) -> None:
        """Do not count time in which this process itself was stopped as silence of its peers."""
        now = time.monotonic()
        absence = now - self._looked_at
        self._looked_at = now
        if absence > 2 * self._settings.interval:
            for connection in self._connections.by_rank.values():
                connection.forgive(absence)

    def _tick(self) -> None:
        # This process may be stopped at any point, so peers are judged by the time of its last check for an absence.
        self._forgive_own_absence()
        self._tick_at = self._looked_at + self._settings.interval / 2
        self._connections.tick(self._looked_at)
        self._flush()
        self._acceptor.tick(self._looked_at)

    def _flush(self) -> None:
        while self._connections.unwritten:
            peer = self._connections.unwritten.pop()
            connection = self._connections.by_rank.get(peer)
            if connection is not None and connection.sock is not None:
                self._write(peer, connection)

    # Messages

    def _read(self, peer: int, connection: Connection) -> None:
        assert connection.sock is not None
        try:
            connection.stream.read(connection.sock, _TURN)
        except ProtocolError as cause:
            self._connections.give_up(peer, str(cause), dead=True)
            return
        except OSError as cause:
            self._connections.interrupted(peer, connection, str(cause))
            return
        connection.hear(time.monotonic())
        if connection.stream.beaten:
            connection.limit.beat(connection.heard)
        if connection.stream.beat_due:
            self._connections.unwritten.add(peer)
        if connection.stream.peer_left and self._members.is_live(peer):
            self._connections.departed(peer, connection)

    def _write(self, peer: int, connection: Connection) -> None:
        assert connection.sock is not None
        try:
            count, more = connection.stream.write(connection.sock, _TURN)
        except OSError as cause:
            self._connections.interrupted(peer, connection, str(cause))
            return
        self.bytes_sent += count
        if more != connection.watching_writes:
            connection.watching_writes = more
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if more else 0)
            self._selector.modify(connection.sock, events, peer)

    def _delivered(self, mail: Mail) -> None:
        if mail.kind not in (LOST, SUSPECT, ALIVE):
            self._events.delivered(mail)
            return
        peer, incarnation = int(mail.header["peer"]), int(mail.header["incarnation"])
        # Not at once, because the stream that delivers this message may still be reading.
        if mail.kind == SUSPECT:
            self.submit(partial(self._connections.suspected_by, mail.sender, peer, incarnation))
        elif mail.kind == ALIVE:
            self.submit(partial(self._connections.confirmed_by, mail.sender, peer, incarnation))
        elif self._members.believes(mail.sender, peer, incarnation):
            why = f"reported by rank {mail.sender}: {mail.header['why']}"
            self.submit(partial(self._connections.lost_according_to, peer, incarnation, why))
        elif mail.sender < peer:
            self.submit(partial(self._given_up_elsewhere, peer, incarnation))

    def _given_up_elsewhere(self, peer: int, incarnation: int) -> None:
        """Let a returning process not wait for a peer that other processes count as lost."""
        if self._members.forget(peer, incarnation):
            self._events.changed()
