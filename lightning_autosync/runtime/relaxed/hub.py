"""The thread that serves a mesh's connections: it accepts, reads, writes, beats, suspects and reconnects."""

from __future__ import annotations

import math
import secrets
import selectors
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from lightning_autosync.errors import ExchangeError, Expelled, PeerLost
from lightning_autosync.runtime.relaxed import handshake
from lightning_autosync.runtime.relaxed.handshake import Answer, Hello, dial_until
from lightning_autosync.runtime.relaxed.heartbeat import HeartbeatSettings, SilenceLimit
from lightning_autosync.runtime.relaxed.link import Link, ProtocolError
from lightning_autosync.runtime.relaxed.membership import Membership, Status
from lightning_autosync.runtime.relaxed.messages import Mail, Message, Sent, encode_head
from lightning_autosync.runtime.sockets import tune_connection

_TURN = 512 * 1024
"""Bytes that one peer may send or be sent before the others get their turn."""

_PARTING = 5.0
"""Seconds that closing may take to get the last frames out and confirmed."""

_LOST = "mesh.lost"
"""Kind of the message that tells others of a loss."""


class Events(Protocol):
    """What the hub tells; all on its thread."""

    def delivered(self, mail: Mail) -> None: ...

    def place(self, sender: int, kind: str, header: dict[str, Any], size: int) -> memoryview | None: ...

    def joined(self, peer: int) -> None: ...

    def lost(self, peer: int, why: str) -> None: ...

    def departed(self, peer: int) -> None: ...

    def failed(self, error: ExchangeError) -> None: ...


@dataclass(eq=False)
class _Line:
    """A live peer: its link, and the connection that carries it at the moment."""

    link: Link
    limit: SilenceLimit
    address: tuple[str, int]
    socket: socket.socket | None = None
    heard: float = 0.0
    unproven: bool = True
    """Nothing was heard on the present connection."""
    deadline: float = math.inf
    """When to give up: a broken line that is not replaced, or a peer that left and does not close."""
    watching_writes: bool = False


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
        secret: str,
        settings: HeartbeatSettings,
        events: Events,
        largest: int,
    ) -> None:
        self.bytes_sent = 0
        self.error: ExchangeError | None = None
        self._members, self._listener, self._secret = members, listener, secret
        self._settings, self._events, self._largest = settings, events, largest
        self._address = listener.getsockname()[:2]
        self._lines: dict[int, _Line] = {}
        self._guests: dict[socket.socket, tuple[bytearray, float]] = {}
        self._unwritten: set[int] = set()
        self._orders: deque[Callable[[], None]] = deque()
        self._awake = False
        self._closing = math.inf
        self._dialers: list[threading.Thread] = []
        self._tick_at = self._looked_at = time.monotonic()
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for acceptor, handler in ((self._woken, self._obey), (listener, self._accept)):
            acceptor.setblocking(False)
            self._selector.register(acceptor, selectors.EVENT_READ, handler)
        self._thread = threading.Thread(target=self._serve, name="autosync-mesh", daemon=True)
        self._thread.start()

    # For any thread

    def submit(self, order: Callable[[], None]) -> None:
        """Run ``order`` on the hub's thread."""
        self._orders.append(order)
        if not self._awake:
            self._awake = True
            self._wake.send(b"\0")

    def perform(self, order: Callable[[], None]) -> None:
        """Run ``order`` on the hub's thread and wait until it has run, or until the hub is closed."""
        if threading.current_thread() is self._thread:
            order()
            return
        done = threading.Event()
        self.submit(order)
        self.submit(done.set)
        while not done.wait(0.1) and self._thread.is_alive():
            pass

    def post(self, peer: int, message: Message) -> None:
        """Queue a message; it settles with an error if the peer is gone."""
        self.submit(partial(self._post, peer, message))

    def join(self, peer: int, address: tuple[str, int], timeout: float) -> None:
        """Call a peer for the first time, on a thread of its own; `Events.joined` tells when it is connected."""
        self._members.dialling.add(peer)
        hello = self._hello(handshake.JOIN, 0, 0)
        self._dial(peer, address, hello, timeout, lambda: self._members.status(peer) is not Status.UNKNOWN)

    def close(self) -> None:
        """Send what is queued, take leave, stop the thread and close all connections."""
        if self._thread.is_alive():
            self.submit(self._take_leave)
            self._thread.join()
        for dialer in self._dialers:
            dialer.join()
        for connection in (self._listener, self._wake, self._woken, *self._guests):
            connection.close()
        for line in self._lines.values():
            line.link.abandon(ExchangeError("the mesh was closed"))
            if line.socket is not None:
                line.socket.close()
        self._selector.close()

    # The loop

    def _serve(self) -> None:
        while not self._finished():
            try:
                events = self._selector.select(max(0.0, self._tick_at - time.monotonic()))
                self._forgive_own_absence()
                for key, mask in events:
                    self._attend(key.fileobj, key.data, mask)
                self._flush()
                if time.monotonic() >= self._tick_at:
                    self._tick()
            except Exception as cause:
                self._fail(ExchangeError(f"the mesh broke: {cause}\n{traceback.format_exc()}"))

    def _finished(self) -> bool:
        if self._closing == math.inf:
            return False
        connected = [line for line in self._lines.values() if line.socket is not None]
        return time.monotonic() > self._closing or all(line.link.idle or line.link.peer_left for line in connected)

    def _attend(self, source: object, handler: Callable[[], None] | int, mask: int) -> None:
        if not isinstance(handler, int):
            handler()
            return
        line = self._lines.get(handler)
        if line is not None and line.socket is source:
            if mask & selectors.EVENT_READ:
                self._read(handler, line)
            if mask & selectors.EVENT_WRITE:
                self._unwritten.add(handler)

    def _forgive_own_absence(self) -> None:
        """A process that was stopped itself must not blame its peers for the silence."""
        now = time.monotonic()
        absence = now - self._looked_at
        self._looked_at = now
        if absence > 2 * self._settings.interval:
            for line in self._lines.values():
                line.heard += absence
                line.deadline += absence
                line.limit.pause()

    def _tick(self) -> None:
        # Judge by the time at which the own absence was looked at: this process may be stopped at any line.
        self._forgive_own_absence()
        now = self._looked_at
        self._tick_at = now + self._settings.interval / 2
        for peer, line in list(self._lines.items()):
            if now > line.deadline:
                self._expire(peer, line)
            elif line.socket is not None:
                silence = now - line.heard
                if silence > line.limit.seconds and not line.link.peer_left:
                    self._lose(peer, f"it was silent for {silence:.1f} s")
                else:
                    line.link.beat_due = True
                    self._unwritten.add(peer)
        self._flush()
        for guest, (_, deadline) in list(self._guests.items()):
            if now > deadline:
                self._turn_away(guest)
        self._dialers = [dialer for dialer in self._dialers if dialer.is_alive()]

    def _obey(self) -> None:
        try:
            while self._woken.recv(4096):
                pass
        except BlockingIOError:
            pass
        # In this order: who submits from now on wakes the thread again.
        self._awake = False
        while self._orders:
            self._orders.popleft()()

    def _flush(self) -> None:
        while self._unwritten:
            peer = self._unwritten.pop()
            line = self._lines.get(peer)
            if line is not None and line.socket is not None:
                self._write(peer, line)

    # Messages

    def _post(self, peer: int, message: Message) -> None:
        line = self._lines.get(peer)
        if line is None or not self._members.is_live(peer):
            message.sent.settle(self.error or PeerLost(peer, self._members.reason(peer)))
            return
        line.link.post(message)
        self._unwritten.add(peer)

    def _tell(self, peer: int, kind: str, header: dict[str, object]) -> None:
        self._post(peer, Message(encode_head(kind, header), [], Sent()))

    def _read(self, peer: int, line: _Line) -> None:
        assert line.socket is not None
        try:
            line.link.read(line.socket, _TURN)
        except ProtocolError as cause:
            self._lose(peer, str(cause))
            return
        except OSError as cause:
            self._interrupted(peer, line, str(cause))
            return
        line.heard, line.unproven = time.monotonic(), False
        if line.link.beaten:
            line.limit.beat(line.heard)
        if line.link.beat_due:
            self._unwritten.add(peer)
        if line.link.peer_left and self._members.is_live(peer):
            line.deadline = time.monotonic() + _PARTING
            self._members.gone(peer, Status.LEFT, "it has left")
            self._events.departed(peer)

    def _write(self, peer: int, line: _Line) -> None:
        assert line.socket is not None
        try:
            count, more = line.link.write(line.socket, _TURN)
        except OSError as cause:
            self._interrupted(peer, line, str(cause))
            return
        self.bytes_sent += count
        if more != line.watching_writes:
            line.watching_writes = more
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if more else 0)
            self._selector.modify(line.socket, events, peer)

    def _delivered(self, mail: Mail) -> None:
        if mail.kind != _LOST:
            self._events.delivered(mail)
            return
        accused, incarnation = int(mail.header["peer"]), int(mail.header["incarnation"])
        if self._members.believes(mail.sender, accused, incarnation):
            why = f"so says rank {mail.sender}: {mail.header['why']}"
            # Not at once: the link that delivers this may be in the midst of reading.
            self.submit(partial(self._adopt, accused, incarnation, why))

    def _adopt(self, accused: int, incarnation: int, why: str) -> None:
        if accused != self._members.rank and incarnation != self._members.incarnation_of(accused):
            return  # it has come back meanwhile
        if accused == self._members.rank:
            self._fail(Expelled(f"rank {accused} was given up ({why}); it can join again"))
        elif self._members.is_live(accused):
            self._lose(accused, why, tell=False)

    # Connections

    def _accept(self) -> None:
        try:
            guest, _ = self._listener.accept()
        except OSError:
            return
        guest.setblocking(False)
        self._guests[guest] = bytearray(), time.monotonic() + self._settings.redial
        self._selector.register(guest, selectors.EVENT_READ, partial(self._greet, guest))

    def _greet(self, guest: socket.socket) -> None:
        if guest not in self._guests:
            return
        said, _ = self._guests[guest]
        try:
            part = guest.recv(2048)
            said += part
            hello = handshake.decode_hello(said)
        except BlockingIOError:
            return
        except (OSError, ExchangeError):
            self._turn_away(guest)
            return
        if not part or (hello is not None and not secrets.compare_digest(hello.secret.encode(), self._secret.encode())):
            self._turn_away(guest)
        elif hello is not None:
            self._answer(guest, hello)

    def _turn_away(self, guest: socket.socket) -> None:
        self._guests.pop(guest, None)
        self._selector.unregister(guest)
        guest.close()

    def _answer(self, guest: socket.socket, hello: Hello) -> None:
        if self._closing < math.inf or self.error is not None:
            self._turn_away(guest)
            return
        verdict = self._members.judge(hello)
        resumed = hello.purpose == handshake.RESUME
        received = self._lines[hello.rank].link.received if verdict == handshake.WELCOME and resumed else 0
        try:
            guest.sendall(handshake.encode(Answer(verdict, self._members.incarnation, received)))
        except OSError:
            verdict = handshake.EXPELLED
        if verdict != handshake.WELCOME:
            self._turn_away(guest)
            return
        del self._guests[guest]
        self._selector.unregister(guest)
        if resumed:
            self._resume(hello.rank, guest, hello.received)
        else:
            self._begin(hello.rank, guest, hello.incarnation, (hello.host, hello.port))

    def _begin(self, peer: int, connection: socket.socket, incarnation: int, address: tuple[str, int]) -> None:
        """A peer's first connection under this incarnation."""
        if self._members.is_live(peer):
            self._lose(peer, "it has started anew", tell=False)
        self._remove(peer, PeerLost(peer, "it has left"))
        link = Link(peer, partial(self._events.place, peer), self._delivered, self._largest)
        self._lines[peer] = line = _Line(link, SilenceLimit(self._settings), address)
        self._members.connected(peer, incarnation)
        self._attach(peer, line, connection)
        self._events.joined(peer)

    def _resume(self, peer: int, connection: socket.socket, peer_received: int) -> None:
        """A new connection in place of one that dropped."""
        line = self._lines[peer]
        self._detach(line)
        try:
            line.link.resume(peer_received)
        except ProtocolError as cause:
            connection.close()
            self._lose(peer, str(cause))
            return
        self._members.connected(peer, self._members.incarnation_of(peer))
        self._attach(peer, line, connection)

    def _attach(self, peer: int, line: _Line, connection: socket.socket) -> None:
        tune_connection(connection, None)
        line.socket, line.heard, line.unproven, line.deadline = connection, time.monotonic(), True, math.inf
        line.watching_writes = False
        line.limit.pause()
        self._selector.register(connection, selectors.EVENT_READ, peer)
        line.link.beat_due = True
        self._unwritten.add(peer)

    def _detach(self, line: _Line) -> None:
        if line.socket is not None:
            self._selector.unregister(line.socket)
            line.socket.close()
            line.socket = None

    def _interrupted(self, peer: int, line: _Line, why: str) -> None:
        """A connection dropped: the lower rank calls again, the higher one asks whether that will happen."""
        self._detach(line)
        if line.link.peer_left or self._closing < math.inf:
            self._remove(peer, PeerLost(peer, "it has left"))
        elif line.unproven:
            self._lose(peer, why)
        else:
            self._members.broken(peer)
            line.deadline = time.monotonic() + 2 * self._settings.redial
            purpose = handshake.RESUME if self._members.rank < peer else handshake.PROBE
            hello = self._hello(purpose, self._members.incarnation_of(peer), line.link.received)
            self._dial(peer, line.address, hello, self._settings.redial, lambda: line.socket is not None)

    def _expire(self, peer: int, line: _Line) -> None:
        if line.link.peer_left:
            self._remove(peer, PeerLost(peer, "it has left"))
        else:
            self._lose(peer, "its connection dropped and could not be replaced")

    def _hello(self, purpose: str, target: int, received: int) -> Hello:
        members = self._members
        return Hello(self._secret, purpose, members.rank, members.incarnation, target, received, *self._address)

    def _dial(
        self, peer: int, address: tuple[str, int], hello: Hello, timeout: float, settled: Callable[[], bool]
    ) -> None:
        def call() -> None:
            try:
                found = dial_until(address, hello, time.monotonic() + timeout, settled)
            except OSError as cause:
                self.submit(partial(self._not_reached, peer, hello.purpose, str(cause)))
            else:
                self.submit(partial(self._reached, peer, address, hello, found))

        dialer = threading.Thread(target=call, name=f"autosync-dial-{peer}", daemon=True)
        self._dialers.append(dialer)
        dialer.start()

    def _reached(
        self, peer: int, address: tuple[str, int], hello: Hello, found: tuple[socket.socket, Answer] | None
    ) -> None:
        self._members.dialling.discard(peer)
        if found is None:
            return
        connection, answer = found
        if answer.verdict == handshake.WELCOME and self._still_wanted(peer, hello):
            if hello.purpose == handshake.JOIN:
                self._begin(peer, connection, answer.incarnation, address)
            else:
                self._resume(peer, connection, answer.received)
            return
        connection.close()
        if answer.verdict == handshake.EXPELLED:
            self._given_up_by(peer)
        elif answer.verdict == handshake.STALE and self._members.is_live(peer):
            self._lose(peer, "it has started anew")

    def _still_wanted(self, peer: int, hello: Hello) -> bool:
        if self._closing < math.inf or self.error is not None:
            return False
        if hello.purpose == handshake.JOIN:
            return self._members.status(peer) in (Status.UNKNOWN, Status.LOST, Status.LEFT)
        return self._members.status(peer) is Status.BROKEN

    def _not_reached(self, peer: int, purpose: str, why: str) -> None:
        self._members.dialling.discard(peer)
        if purpose == handshake.JOIN and self._members.status(peer) is Status.UNKNOWN:
            self._members.gone(peer, Status.LOST, f"it cannot be reached: {why}")
            self._events.lost(peer, self._members.reason(peer))
        elif self._members.status(peer) is Status.BROKEN:
            self._lose(peer, f"its connection dropped and could not be replaced: {why}")

    def _given_up_by(self, peer: int) -> None:
        if self._members.expelled_by(peer):
            self._fail(Expelled(f"rank {self._members.rank} was given up by rank {peer}; it can join again"))
        elif self._members.is_live(peer):
            self._lose(peer, "it cannot hear this rank")

    def _lose(self, peer: int, why: str, *, tell: bool = True) -> None:
        """Give a peer up, and let the others know."""
        incarnation = self._members.incarnation_of(peer)
        self._members.gone(peer, Status.LOST, why)
        self._remove(peer, PeerLost(peer, why))
        if tell:
            for other in self._members.others():
                self._tell(other, _LOST, {"peer": peer, "incarnation": incarnation, "why": why})
        self._events.lost(peer, why)

    def _remove(self, peer: int, error: ExchangeError) -> None:
        line = self._lines.pop(peer, None)
        if line is not None:
            self._detach(line)
            line.link.abandon(error)

    def _fail(self, error: ExchangeError) -> None:
        """Go on without anybody: expelled, or broken by a defect."""
        self.error = self.error or error
        for peer in list(self._lines):
            if self._members.is_live(peer):
                self._members.gone(peer, Status.LOST, str(error))
            self._remove(peer, error)
        self._events.failed(self.error)

    def _take_leave(self) -> None:
        self._closing = time.monotonic() + _PARTING
        for peer, line in list(self._lines.items()):
            if line.socket is None:
                self._remove(peer, ExchangeError("the mesh was closed"))
            else:
                line.link.leave()
                self._unwritten.add(peer)
