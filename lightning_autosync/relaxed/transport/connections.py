"""The connections of a mesh: opening, replacement after a drop, loss of peers, and closing."""

from __future__ import annotations

import math
import selectors
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from lightning_autosync.engine.authentication import Caller
from lightning_autosync.engine.connections import tune_connection
from lightning_autosync.errors import ExchangeError, Expelled, PeerLost
from lightning_autosync.relaxed.transport import handshake
from lightning_autosync.relaxed.transport.handshake import Answer, Connector, Hello
from lightning_autosync.relaxed.transport.heartbeat import HeartbeatSettings, SilenceLimit
from lightning_autosync.relaxed.transport.membership import Membership, Status
from lightning_autosync.relaxed.transport.messages import Mail, OutgoingMessage, Sent, encode_head
from lightning_autosync.relaxed.transport.stream import Connection, FrameStream, ProtocolError

CLOSE_TIMEOUT = 5.0
"""Longest time in seconds that closing waits until the last frames are sent and confirmed."""

LOST, SUSPECT, ALIVE = "mesh.lost", "mesh.suspect", "mesh.alive"
"""Kinds of messages between meshes: a loss, the question whether others hear a peer, and the answer that they do."""


class MeshEvents(Protocol):
    """Callbacks for events of a mesh, on the thread that serves its connections."""

    def delivered(self, mail: Mail) -> None: ...

    def place(self, sender: int, kind: str, header: dict[str, Any], size: int) -> memoryview | None: ...

    def joined(self, peer: int) -> None: ...

    def lost(self, peer: int, why: str) -> None: ...

    def departed(self, peer: int) -> None: ...

    def failed(self, error: ExchangeError) -> None: ...

    def changed(self) -> None: ...


class Connections:
    """Connections to live peers. All methods except `join` are for the mesh's thread only.

    Args:
        submit: runs a call on the mesh's thread.
        address: host and port at which this process listens.
        largest: limit on the payload of a message in bytes.
        deliver: called with each message, before ``events``.

    Attributes:
        by_rank: connections by the peer's rank.
        unwritten: ranks of peers for which there may be data to write.
        error: the error that ended the mesh; None while it works.
        closing: deadline of closing, in monotonic seconds; infinite before.
    """

    def __init__(
        self,
        members: Membership,
        settings: HeartbeatSettings,
        events: MeshEvents,
        submit: Callable[[Callable[[], None]], None],
        selector: selectors.BaseSelector,
        secret: bytes,
        address: tuple[str, int],
        largest: int,
        deliver: Callable[[Mail], None],
    ) -> None:
        self.by_rank: dict[int, Connection] = {}
        self.unwritten: set[int] = set()
        self.error: ExchangeError | None = None
        self.closing = math.inf
        self._members, self._settings, self._events = members, settings, events
        self._submit, self._selector = submit, selector
        self._address, self._largest, self._deliver = address, largest, deliver
        self._reasons: dict[int, str] = {}
        self._connector = Connector(secret)

    def post(self, peer: int, message: OutgoingMessage) -> None:
        """Queue a message; it fails if the peer is gone."""
        connection = self.by_rank.get(peer)
        if connection is None or not self._members.is_live(peer):
            message.sent.settle(self.error or PeerLost(peer, self._members.reason(peer)))
            return
        connection.stream.post(message)
        self.unwritten.add(peer)

    def tick(self, now: float) -> None:
        """Send beats, and check silences and broken connections at ``now``."""
        for peer, connection in list(self.by_rank.items()):
            if now > connection.deadline:
                self._expire(peer, connection)
            elif connection.sock is not None and connection.too_silent(now):
                self._suspect(peer, connection, now)
            elif connection.sock is not None:
                connection.stream.beat_due = True
                self.unwritten.add(peer)

    # First connections

    def join(self, peer: int, address: tuple[str, int], incarnation: int, timeout: float) -> None:
        """Connect to a peer for the first time; `MeshEvents.joined` is called once it is connected."""
        self._members.connecting[peer] = address
        hello = self._hello(handshake.JOIN, 0, 0)
        failed = partial(self._join_failed, peer, incarnation)
        self._dial(peer, address, hello, timeout, lambda: self._members.status(peer) is not Status.UNKNOWN, failed)

    def answer(self, caller: Caller) -> None:
        """Answer a process that has proved that it knows the secret."""
        guest = caller.connection
        try:
            hello = handshake.decode_hello(caller.claim)
            if self.closing < math.inf or self.error is not None:
                verdict = handshake.ENDED
            else:
                verdict = self._members.judge(hello)
            resumed = hello.purpose == handshake.RESUME
            received = self.by_rank[hello.rank].stream.received if verdict == handshake.WELCOME and resumed else 0
            answer = Answer(verdict, self._members.incarnation, received, self._members.incarnations())
            caller.answer(handshake.encode(answer))
        except (OSError, ExchangeError):
            guest.close()
            return
        if verdict != handshake.WELCOME:
            guest.close()
        elif resumed:
            self._resume(hello.rank, guest, hello.received)
        else:
            self._begin(hello.rank, guest, hello.incarnation, (hello.host, hello.port))

    def _begin(self, peer: int, sock: socket.socket, incarnation: int, address: tuple[str, int]) -> None:
        """Begin with a peer's first connection under this incarnation."""
        if self._members.is_live(peer):
            self._lose(peer, "it restarted", tell=False)
        self.remove(peer, PeerLost(peer, "it has left"))
        stream = FrameStream(peer, partial(self._events.place, peer), self._deliver, self._largest)
        self.by_rank[peer] = connection = Connection(stream, SilenceLimit(self._settings), address)
        self._members.connected(peer, incarnation)
        self._attach(peer, connection, sock)
        self._events.joined(peer)

    def _attach(self, peer: int, connection: Connection, sock: socket.socket) -> None:
        tune_connection(sock, None)
        connection.attach(sock, time.monotonic())
        self._selector.register(sock, selectors.EVENT_READ, peer)
        self.unwritten.add(peer)

    def _detach(self, connection: Connection) -> None:
        if connection.sock is not None:
            self._selector.unregister(connection.sock)
            connection.sock.close()
            connection.sock = None

    # Dropped connections and their replacement

    def interrupted(self, peer: int, connection: Connection, why: str) -> None:
        """Replace a dropped connection: the lower rank connects again; the higher rank probes whether its peer will."""
        self._detach(connection)
        if connection.stream.peer_left or self.closing < math.inf:
            self.remove(peer, PeerLost(peer, "it has left"))
            return
        self._reasons[peer] = why
        self._members.broken(peer)
        # A connection that was replaced before, and on which nothing came since, gets no additional time.
        connection.deadline = min(connection.deadline, time.monotonic() + 2 * self._settings.redial)
        purpose = handshake.RESUME if self._members.rank < peer else handshake.PROBE
        hello = self._hello(purpose, self._members.incarnation_of(peer), connection.stream.received)
        failed = partial(self._resume_failed, peer, hello.target)
        settled = partial(self._replaced, peer, hello.target)
        self._dial(peer, connection.address, hello, self._settings.redial, settled, failed)

    def _suspect(self, peer: int, connection: Connection, now: float) -> None:
        """Handle a silent peer: try a new connection once, then give the peer up."""
        first = connection.silent_from is None
        connection.silent_from = connection.heard if connection.silent_from is None else connection.silent_from
        why = f"it was silent for {now - connection.silent_from:.1f} s"
        if first:
            self.interrupted(peer, connection, why)
        else:
            self.give_up(peer, why)

    def _resume(self, peer: int, sock: socket.socket, peer_received: int) -> None:
        """Continue over a new connection in place of the dropped one."""
        connection = self.by_rank[peer]
        self._detach(connection)
        try:
            connection.stream.resume(peer_received)
        except ProtocolError as cause:
            sock.close()
            self._lose(peer, str(cause))
            return
        self._members.connected(peer, self._members.incarnation_of(peer))
        self._attach(peer, connection, sock)

    def _hello(self, purpose: str, target: int, received: int) -> Hello:
        members = self._members
        return Hello(purpose, members.rank, members.incarnation, target, received, *self._address)

    def _dial(
        self,
        peer: int,
        address: tuple[str, int],
        hello: Hello,
        timeout: float,
        settled: Callable[[], bool],
        failed: Callable[[OSError], None],
    ) -> None:
        self._connector.connect(
            address,
            hello,
            timeout,
            settled,
            lambda found: self._submit(partial(self._connected, peer, address, hello, found)),
            lambda cause: self._submit(partial(failed, cause)),
        )

    def _connected(
        self, peer: int, address: tuple[str, int], hello: Hello, found: tuple[socket.socket, Answer] | None
    ) -> None:
        if hello.purpose == handshake.JOIN:
            self._members.connecting.pop(peer, None)
        if found is None:
            return
        sock, answer = found
        if answer.verdict == handshake.WELCOME and self._still_wanted(peer, hello):
            if hello.purpose == handshake.JOIN:
                self._members.learn(answer.live)
                self._begin(peer, sock, answer.incarnation, address)
            else:
                self._resume(peer, sock, answer.received)
            return
        sock.close()
        if hello.purpose != handshake.JOIN and not self._still_broken(peer, hello.target):
            return  # the answer is for an earlier incarnation, or the peer counts as lost meanwhile
        if answer.verdict == handshake.EXPELLED:
            self._given_up_by(peer)
        elif answer.verdict == handshake.STALE and self._members.is_live(peer):
            self._lose(peer, "it restarted")

    def _still_wanted(self, peer: int, hello: Hello) -> bool:
        if self.closing < math.inf or self.error is not None:
            return False
        if hello.purpose == handshake.JOIN:
            return self._members.status(peer) in (Status.UNKNOWN, Status.LOST, Status.LEFT)
        return self._still_broken(peer, hello.target)

    def _replaced(self, peer: int, incarnation: int) -> bool:
        return not self._still_broken(peer, incarnation)

    def _still_broken(self, peer: int, incarnation: int) -> bool:
        return self._members.status(peer) is Status.BROKEN and incarnation == self._members.incarnation_of(peer)

    def _join_failed(self, peer: int, incarnation: int, cause: OSError) -> None:
        self._members.connecting.pop(peer, None)
        if not isinstance(cause, TimeoutError):
            # Nothing listens there, so that incarnation has ended, even if other peers count it as live.
            self._members.forget(peer, incarnation)
        if self._members.status(peer) is Status.UNKNOWN:
            self._members.gone(peer, Status.LOST, f"it cannot be reached: {cause}")
            self._events.lost(peer, self._members.reason(peer))

    def _resume_failed(self, peer: int, incarnation: int, cause: OSError) -> None:
        if self._still_broken(peer, incarnation):
            why = f"{self._reasons.get(peer, 'its connection dropped')}, and it could not be reached again: {cause}"
            self.give_up(peer, why, dead=isinstance(cause, ConnectionRefusedError))

    # Losses

    def give_up(self, peer: int, why: str, dead: bool = False) -> None:
        """Give up a peer that cannot be heard.

        If the peer's rank is lower, ask other peers first: if one of them hears the peer, this process must leave.

        Args:
            dead: whether the peer has certainly ended, so that there is no need to ask.
        """
        connection = self.by_rank.get(peer)
        others = list(self._members.others(peer))
        if connection is None or dead or peer > self._members.rank or connection.disputed or not others:
            self._lose(peer, why)
            return
        self._detach(connection)
        self._members.broken(peer)
        self._reasons[peer] = why
        connection.disputed, connection.deadline = True, time.monotonic() + 2 * self._settings.interval
        for other in others:
            self._tell(other, SUSPECT, {"peer": peer, "incarnation": self._members.incarnation_of(peer)})

    def suspected_by(self, reporter: int, peer: int, incarnation: int) -> None:
        """Answer ``reporter``, which cannot hear ``peer``, if this process hears it."""
        connection = self.by_rank.get(peer)
        known = (
            connection is not None and connection.sock is not None and incarnation == self._members.incarnation_of(peer)
        )
        if connection is not None and known and time.monotonic() - connection.heard < 2 * self._settings.interval:
            self._tell(reporter, ALIVE, {"peer": peer, "incarnation": incarnation})

    def confirmed_by(self, witness: int, peer: int, incarnation: int) -> None:
        """Leave the mesh if ``witness`` hears a peer that this process does not hear."""
        connection = self.by_rank.get(peer)
        if connection is not None and connection.disputed and incarnation == self._members.incarnation_of(peer):
            rank = self._members.rank
            why = f"rank {rank} was expelled: it cannot hear rank {peer}, which rank {witness} hears; it can join again"
            self.fail(Expelled(why))

    def lost_according_to(self, accused: int, incarnation: int, why: str) -> None:
        """Accept the report of a loss by another process."""
        if accused == self._members.rank:
            self.fail(Expelled(f"rank {accused} was expelled ({why}); it can join again"))
        elif self._members.is_live(accused) and incarnation == self._members.incarnation_of(accused):
            self._lose(accused, why, tell=False)

    def _expire(self, peer: int, connection: Connection) -> None:
        if connection.stream.peer_left:
            self.remove(peer, PeerLost(peer, "it has left"))
        else:
            self.give_up(peer, self._reasons.get(peer, "its connection dropped and could not be replaced"))

    def _given_up_by(self, peer: int) -> None:
        if self._members.expelled_by(peer):
            self.fail(Expelled(f"rank {self._members.rank} was expelled by rank {peer}; it can join again"))
        elif self._members.is_live(peer):
            self._lose(peer, "it cannot hear this rank")

    def _lose(self, peer: int, why: str, *, tell: bool = True) -> None:
        """Mark a peer as lost; with ``tell``, report the loss to the other peers."""
        incarnation = self._members.incarnation_of(peer)
        self._members.gone(peer, Status.LOST, why)
        self._members.forget(peer, incarnation)
        self.remove(peer, PeerLost(peer, why))
        if tell:
            for other in self._members.others():
                self._tell(other, LOST, {"peer": peer, "incarnation": incarnation, "why": why})
        self._events.lost(peer, why)

    def remove(self, peer: int, error: ExchangeError) -> None:
        """Remove a connection; messages to the peer fail with ``error``."""
        connection = self.by_rank.pop(peer, None)
        if connection is not None:
            self._detach(connection)
            connection.stream.abandon(error)

    def fail(self, error: ExchangeError) -> None:
        """Drop all peers, because this process was expelled, or because a defect broke the mesh."""
        self.error = self.error or error
        for peer in list(self.by_rank):
            if self._members.is_live(peer):
                self._members.gone(peer, Status.LOST, str(error))
            self.remove(peer, error)
        self._events.failed(self.error)

    # Leaving

    def departed(self, peer: int, connection: Connection) -> None:
        """Note that a peer has taken leave; it closes the connection when all its messages are confirmed."""
        connection.deadline = time.monotonic() + CLOSE_TIMEOUT
        self._members.gone(peer, Status.LEFT, "it has left")
        self._members.forget(peer, self._members.incarnation_of(peer))
        self._events.departed(peer)

    def take_leave(self) -> None:
        """Take leave of all peers after the queued messages."""
        self.closing = time.monotonic() + CLOSE_TIMEOUT
        self._connector.stop()
        for peer, connection in list(self.by_rank.items()):
            if connection.sock is None:
                self.remove(peer, ExchangeError("the mesh was closed"))
            else:
                connection.stream.leave()
                self.unwritten.add(peer)

    @property
    def finished(self) -> bool:
        """Whether all messages are confirmed, or the deadline of closing is over; call this after `take_leave`."""
        connected = [connection for connection in self.by_rank.values() if connection.sock is not None]
        return time.monotonic() > self.closing or all(
            connection.stream.idle or connection.stream.peer_left for connection in connected
        )

    def stop(self) -> None:
        """Cancel all attempts to connect, and wait until they have ended."""
        self._connector.stop()
        self._connector.join()

    def close(self) -> None:
        """Close all connections."""
        for connection in self.by_rank.values():
            connection.stream.abandon(ExchangeError("the mesh was closed"))
            if connection.sock is not None:
                connection.sock.close()

    def _tell(self, peer: int, kind: str, header: dict[str, object]) -> None:
        self.post(peer, OutgoingMessage(encode_head(kind, header), [], Sent()))
