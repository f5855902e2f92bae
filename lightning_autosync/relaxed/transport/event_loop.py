"""The thread that serves a mesh's connections: it reads, writes, and makes the calls that others leave."""

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
from lightning_autosync.relaxed.transport.connections import DOUBT, HEARD, LOST, Events, Peers
from lightning_autosync.relaxed.transport.heartbeat import HeartbeatSettings
from lightning_autosync.relaxed.transport.membership import Membership
from lightning_autosync.relaxed.transport.messages import Mail, Message
from lightning_autosync.relaxed.transport.stream import Line, ProtocolError


class Orders:
    """A queue of calls with a socket that becomes readable when there are any.

    Attributes:
        woken: to be watched by the thread that calls `obey`.
    """

    def __init__(self) -> None:
        self._orders: deque[Callable[[], None]] = deque()
        self._awake = self._closed = False
        self._submitting = threading.Lock()
        self._wake, self.woken = socket.socketpair()
        self.woken.setblocking(False)

    def submit(self, order: Callable[[], None]) -> None:
        """Leave a call; from any thread.

        Raises:
            ExchangeError: the queue is closed.
        """
        with self._submitting:
            if self._closed:
                raise ExchangeError("the mesh is closed")
            self._orders.append(order)
            self._rouse()

    def obey(self) -> None:
        """Make all calls that were left; where one raises, the thread wakes again for those behind it."""
        try:
            while self.woken.recv(4096):
                pass
        except BlockingIOError:
            pass
        # In this order: who submits from now on wakes the thread again.
        self._awake = False
        try:
            while self._orders:
                self._orders.popleft()()
        finally:
            if self._orders:  # for which somebody may wait
                self._rouse()

    def _rouse(self) -> None:
        if not self._awake:
            self._awake = True
            self._wake.send(b"\0")

    def close(self) -> list[Callable[[], None]]:
        """Take no more calls.

        Returns:
            Those that were left and not made.
        """
        with self._submitting:
            self._closed = True
            self._wake.close()
            self.woken.close()
            left = list(self._orders)
            self._orders.clear()
        return left


_TURN = 512 * 1024
"""Bytes that one peer may send or be sent before the others get their turn."""


class Hub:
    """Connections of one process of a mesh.

    Args:
        listener: a listening socket, whose address the peers know; the hub owns it.
        largest: payload bytes that a message may have at most.
    """

    def __init__(
        self,
        members: Membership,
        listener: socket.socket,
        secret: bytes,
        settings: HeartbeatSettings,
        events: Events,
        largest: int,
    ) -> None:
        self.bytes_sent = 0
        self._members, self._settings, self._events = members, settings, events
        self._orders = Orders()
        self._selector = selectors.DefaultSelector()
        self._address = listener.getsockname()[:2]
        self._peers = Peers(
            members,
            settings,
            events,
            self._orders.submit,
            self._selector,
            secret,
            self._address,
            largest,
            self._delivered,
        )
        self._acceptor = Acceptor(listener, self._selector, secret, settings.redial, self._peers.answer)
        self._tick_at = self._looked_at = time.monotonic()
        self._selector.register(self._orders.woken, selectors.EVENT_READ, self._orders.obey)
        self._thread = threading.Thread(target=self._serve, name="autosync-mesh", daemon=True)
        self._thread.start()

    # For any thread

    @property
    def error(self) -> ExchangeError | None:
        """What ended the mesh, if anything did."""
        return self._peers.error

    def submit(self, order: Callable[[], None]) -> None:
        """Run ``order`` on the hub's thread."""
        self._orders.submit(order)

    def perform(self, order: Callable[[], None]) -> None:
        """Run ``order`` on the hub's thread and wait until it has run, or until the hub is closed."""
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            order()
            return
        done = threading.Event()
        self.submit(order)
        self.submit(done.set)
        while not done.wait(0.1) and self._thread.is_alive():
            pass

    def post(self, peer: int, message: Message) -> None:
        """Queue a message; it settles with an error if the peer is gone."""
        self.submit(partial(self._peers.post, peer, message))

    def join(self, peer: int, address: tuple[str, int], incarnation: int, timeout: float) -> None:
        """Call a peer for the first time, on a thread of its own; `Events.joined` tells when it is connected."""
        self._peers.join(peer, address, incarnation, timeout)

    def close(self) -> None:
        """Send what is queued, take leave, stop the thread and close all connections."""
        if self._thread.is_alive():
            self.submit(self._peers.take_leave)
            self._thread.join()
        self._peers.hang_up()
        # What came too late for the thread: messages, which settle, and connections, which are closed.
        for order in self._orders.close():
            with suppress(ExchangeError):
                order()
        self._peers.close()
        self._acceptor.close()
        self._selector.close()

    # The loop

    def _serve(self) -> None:
        while self._peers.closing == math.inf or not self._peers.parted:
            try:
                events = self._selector.select(max(0.0, self._tick_at - time.monotonic()))
                self._forgive_own_absence()
                for key, mask in events:
                    self._attend(key.fileobj, key.data, mask)
                self._flush()
                if time.monotonic() >= self._tick_at:
                    self._tick()
            except Exception as cause:
                self._peers.fail(ExchangeError(f"the mesh broke: {cause}\n{traceback.format_exc()}"))

    def _attend(self, source: object, handler: Callable[[], None] | int, mask: int) -> None:
        if not isinstance(handler, int):
            handler()
            return
        line = self._peers.lines.get(handler)
        if line is not None and line.socket is source:
            if mask & selectors.EVENT_READ:
                self._read(handler, line)
            if mask & selectors.EVENT_WRITE:
                self._peers.unwritten.add(handler)

    def _forgive_own_absence(self) -> None:
        """A process that was stopped itself must not blame its peers for the silence."""
        now = time.monotonic()
        absence = now - self._looked_at
        self._looked_at = now
        if absence > 2 * self._settings.interval:
            for line in self._peers.lines.values():
                line.forgive(absence)

    def _tick(self) -> None:
        # Judge by the time at which the own absence was looked at: this process may be stopped at any line.
        self._forgive_own_absence()
        self._tick_at = self._looked_at + self._settings.interval / 2
        self._peers.tick(self._looked_at)
        self._flush()
        self._acceptor.tick(self._looked_at)

    def _flush(self) -> None:
        while self._peers.unwritten:
            peer = self._peers.unwritten.pop()
            line = self._peers.lines.get(peer)
            if line is not None and line.socket is not None:
                self._write(peer, line)

    # Messages

    def _read(self, peer: int, line: Line) -> None:
        assert line.socket is not None
        try:
            line.link.read(line.socket, _TURN)
        except ProtocolError as cause:
            self._peers.give_up(peer, str(cause), dead=True)
            return
        except OSError as cause:
            self._peers.interrupted(peer, line, str(cause))
            return
        line.hear(time.monotonic())
        if line.link.beaten:
            line.limit.beat(line.heard)
        if line.link.beat_due:
            self._peers.unwritten.add(peer)
        if line.link.peer_left and self._members.is_live(peer):
            self._peers.departed(peer, line)

    def _write(self, peer: int, line: Line) -> None:
        assert line.socket is not None
        try:
            count, more = line.link.write(line.socket, _TURN)
        except OSError as cause:
            self._peers.interrupted(peer, line, str(cause))
            return
        self.bytes_sent += count
        if more != line.watching_writes:
            line.watching_writes = more
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if more else 0)
            self._selector.modify(line.socket, events, peer)

    def _delivered(self, mail: Mail) -> None:
        if mail.kind not in (LOST, DOUBT, HEARD):
            self._events.delivered(mail)
            return
        peer, incarnation = int(mail.header["peer"]), int(mail.header["incarnation"])
        # Not at once: the link that delivers this may be in the midst of reading.
        if mail.kind == DOUBT:
            self.submit(partial(self._peers.doubted, mail.sender, peer, incarnation))
        elif mail.kind == HEARD:
            self.submit(partial(self._peers.heard_by, mail.sender, peer, incarnation))
        elif self._members.believes(mail.sender, peer, incarnation):
            why = f"so says rank {mail.sender}: {mail.header['why']}"
            self.submit(partial(self._peers.adopt, peer, incarnation, why))
        elif mail.sender < peer:
            self.submit(partial(self._given_up_elsewhere, peer, incarnation))

    def _given_up_elsewhere(self, peer: int, incarnation: int) -> None:
        """Who comes back need not wait for a peer that the others have given up."""
        if self._members.forget(peer, incarnation):
            self._events.stirred()
