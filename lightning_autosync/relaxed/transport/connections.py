"""The life of a mesh's connections: how peers come, are cut off and called again, are given up, and leave."""

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
from lightning_autosync.relaxed.transport.handshake import Answer, Dialler, Hello
from lightning_autosync.relaxed.transport.heartbeat import HeartbeatSettings, SilenceLimit
from lightning_autosync.relaxed.transport.membership import Membership, Status
from lightning_autosync.relaxed.transport.messages import Mail, Message, Sent, encode_head
from lightning_autosync.relaxed.transport.stream import Line, Link, ProtocolError

PARTING = 5.0
"""Seconds that closing may take to get the last frames out and confirmed."""

LOST, DOUBT, HEARD = "mesh.lost", "mesh.doubt", "mesh.heard"
"""Kinds of messages between meshes: a loss; who else hears this peer, which the sender does not; I do."""


class Events(Protocol):
    """What a mesh is told; all on the thread that serves its connections."""

    def delivered(self, mail: Mail) -> None: ...

    def place(self, sender: int, kind: str, header: dict[str, Any], size: int) -> memoryview | None: ...

    def joined(self, peer: int) -> None: ...

    def lost(self, peer: int, why: str) -> None: ...

    def departed(self, peer: int) -> None: ...

    def failed(self, error: ExchangeError) -> None: ...

    def stirred(self) -> None: ...


class Peers:
    """Lines to live peers. Used by the mesh's thread only, but for `join`.

    Args:
        submit: runs a call on the mesh's thread.
        address: where this process listens.
        deliver: given each message, before it goes to ``events``.

    Attributes:
        lines: by peer.
        unwritten: peers that there may be something to write to.
        error: what ended the mesh, if anything did.
        closing: when closing must be over (seconds, monotonic); infinite before.
    """

    def __init__(
        self,
        members: Membership,
        settings: HeartbeatSettings,
        events: Events,
        submit: Callable[[Callable[[], None]], None],
        selector: selectors.BaseSelector,
        secret: bytes,
        address: tuple[str, int],
        largest: int,
        deliver: Callable[[Mail], None],
    ) -> None:
        self.lines: dict[int, Line] = {}
        self.unwritten: set[int] = set()
        self.error: ExchangeError | None = None
        self.closing = math.inf
        self._members, self._settings, self._events = members, settings, events
        self._submit, self._selector = submit, selector
        self._address, self._largest, self._deliver = address, largest, deliver
        self._reasons: dict[int, str] = {}
        self.dialler = Dialler(secret)

    def post(self, peer: int, message: Message) -> None:
        """Queue a message; it settles with an error if the peer is gone."""
        line = self.lines.get(peer)
        if line is None or not self._members.is_live(peer):
            message.sent.settle(self.error or PeerLost(peer, self._members.reason(peer)))
            return
        line.link.post(message)
        self.unwritten.add(peer)

    def tick(self, now: float) -> None:
        """Beat, and judge silences and broken lines at ``now``."""
        for peer, line in list(self.lines.items()):
            if now > line.deadline:
                self._expire(peer, line)
            elif line.socket is not None and line.too_silent(now):
                self._suspect(peer, line, now)
            elif line.socket is not None:
                line.link.beat_due = True
                self.unwritten.add(peer)

    # Coming

    def join(self, peer: int, address: tuple[str, int], incarnation: int, timeout: float) -> None:
        """Call a peer for the first time; `Events.joined` tells when it is connected."""
        self._members.dialling[peer] = address
        hello = self._hello(handshake.JOIN, 0, 0)
        missed = partial(self._not_joined, peer, incarnation)
        self._dial(peer, address, hello, timeout, lambda: self._members.status(peer) is not Status.UNKNOWN, missed)

    def answer(self, caller: Caller) -> None:
        """A process that knows the secret has connected."""
        guest = caller.connection
        try:
            hello = handshake.decode_hello(caller.claim)
            if self.closing < math.inf or self.error is not None:
                verdict = handshake.ENDED
            else:
                verdict = self._members.judge(hello)
            resumed = hello.purpose == handshake.RESUME
            received = self.lines[hello.rank].link.received if verdict == handshake.WELCOME and resumed else 0
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

    def _begin(self, peer: int, connection: socket.socket, incarnation: int, address: tuple[str, int]) -> None:
        """A peer's first connection under this incarnation."""
        if self._members.is_live(peer):
            self._lose(peer, "it has started anew", tell=False)
        self.remove(peer, PeerLost(peer, "it has left"))
        link = Link(peer, partial(self._events.place, peer), self._deliver, self._largest)
        self.lines[peer] = line = Line(link, SilenceLimit(self._settings), address)
        self._members.connected(peer, incarnation)
        self._attach(peer, line, connection)
        self._events.joined(peer)

    def _attach(self, peer: int, line: Line, connection: socket.socket) -> None:
        tune_connection(connection, None)
        line.socket, line.heard, line.unproven, line.disputed = connection, time.monotonic(), True, False
        line.watching_writes = False
        line.limit.pause()
        self._selector.register(connection, selectors.EVENT_READ, peer)
        line.link.beat_due = True
        self.unwritten.add(peer)

    def _detach(self, line: Line) -> None:
        if line.socket is not None:
            self._selector.unregister(line.socket)
            line.socket.close()
            line.socket = None

    # Cut off, and back

    def interrupted(self, peer: int, line: Line, why: str) -> None:
        """A connection dropped: the lower rank calls again, the higher one asks whether that will happen."""
        self._detach(line)
        if line.link.peer_left or self.closing < math.inf:
            self.remove(peer, PeerLost(peer, "it has left"))
            return
        self._reasons[peer] = why
        self._members.broken(peer)
        # What was replaced before and has not been heard since gets no more time.
        line.deadline = min(line.deadline, time.monotonic() + 2 * self._settings.redial)
        purpose = handshake.RESUME if self._members.rank < peer else handshake.PROBE
        hello = self._hello(purpose, self._members.incarnation_of(peer), line.link.received)
        missed = partial(self._not_resumed, peer, hello.target)
        settled = partial(self._replaced, peer, hello.target)
        self._dial(peer, line.address, hello, self._settings.redial, settled, missed)

    def _suspect(self, peer: int, line: Line, now: float) -> None:
        """It may be the connection, or this process's view of time: ask on a new one before giving up."""
        first = line.silent_from is None
        line.silent_from = line.heard if line.silent_from is None else line.silent_from
        why = f"it was silent for {now - line.silent_from:.1f} s"
        if first:
            self.interrupted(peer, line, why)
        else:
            self.give_up(peer, why)

    def _resume(self, peer: int, connection: socket.socket, peer_received: int) -> None:
        """A new connection in place of one that dropped."""
        line = self.lines[peer]
        self._detach(line)
        try:
            line.link.resume(peer_received)
        except ProtocolError as cause:
            connection.close()
            self._lose(peer, str(cause))
            return
        self._members.connected(peer, self._members.incarnation_of(peer))
        self._attach(peer, line, connection)

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
        missed: Callable[[OSError], None],
    ) -> None:
        self.dialler.call(
            address,
            hello,
            timeout,
            settled,
            lambda found: self._submit(partial(self._reached, peer, address, hello, found)),
            lambda cause: self._submit(partial(missed, cause)),
        )

    def _reached(
        self, peer: int, address: tuple[str, int], hello: Hello, found: tuple[socket.socket, Answer] | None
    ) -> None:
        if hello.purpose == handshake.JOIN:
            self._members.dialling.pop(peer, None)
        if found is None:
            return
        connection, answer = found
        if answer.verdict == handshake.WELCOME and self._still_wanted(peer, hello):
            if hello.purpose == handshake.JOIN:
                self._members.learn(answer.live)
                self._begin(peer, connection, answer.incarnation, address)
            else:
                self._resume(peer, connection, answer.received)
            return
        connection.close()
        if hello.purpose != handshake.JOIN and not self._still_broken(peer, hello.target):
            return  # meant for a predecessor, or the peer was given up meanwhile, whatever it thinks itself
        if answer.verdict == handshake.EXPELLED:
            self._given_up_by(peer)
        elif answer.verdict == handshake.STALE and self._members.is_live(peer):
            self._lose(peer, "it has started anew")

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

    def _not_joined(self, peer: int, incarnation: int, cause: OSError) -> None:
        self._members.dialling.pop(peer, None)
        if not isinstance(cause, TimeoutError):
            # Nobody listens there: that incarnation has ended, whatever others believe.
            self._members.forget(peer, incarnation)
        if self._members.status(peer) is Status.UNKNOWN:
            self._members.gone(peer, Status.LOST, f"it cannot be reached: {cause}")
            self._events.lost(peer, self._members.reason(peer))

    def _not_resumed(self, peer: int, incarnation: int, cause: OSError) -> None:
        if self._still_broken(peer, incarnation):
            why = f"{self._reasons.get(peer, 'its connection dropped')}, and it could not be reached again: {cause}"
            self.give_up(peer, why, dead=isinstance(cause, ConnectionRefusedError))

    # Giving up

    def give_up(self, peer: int, why: str, dead: bool = False) -> None:
        """A peer cannot be heard. If it is of lower rank and others hear it, it is this process that has to leave."""
        line = self.lines.get(peer)
        others = list(self._members.others(peer))
        if line is None or dead or peer > self._members.rank or line.disputed or not others:
            self._lose(peer, why)
            return
        self._detach(line)
        self._members.broken(peer)
        self._reasons[peer] = why
        line.disputed, line.deadline = True, time.monotonic() + 2 * self._settings.interval
        for other in others:
            self._tell(other, DOUBT, {"peer": peer, "incarnation": self._members.incarnation_of(peer)})

    def doubted(self, reporter: int, peer: int, incarnation: int) -> None:
        """``reporter`` cannot hear a peer."""
        line = self.lines.get(peer)
        known = line is not None and line.socket is not None and incarnation == self._members.incarnation_of(peer)
        if line is not None and known and time.monotonic() - line.heard < 2 * self._settings.interval:
            self._tell(reporter, HEARD, {"peer": peer, "incarnation": incarnation})

    def heard_by(self, witness: int, peer: int, incarnation: int) -> None:
        """Another process hears a peer that this one does not."""
        line = self.lines.get(peer)
        if line is not None and line.disputed and incarnation == self._members.incarnation_of(peer):
            rank = self._members.rank
            why = f"rank {rank} was given up: it cannot hear rank {peer}, which rank {witness} hears; it can join again"
            self.fail(Expelled(why))

    def adopt(self, accused: int, incarnation: int, why: str) -> None:
        """Believe another's report of a loss."""
        if accused == self._members.rank:
            self.fail(Expelled(f"rank {accused} was given up ({why}); it can join again"))
        elif self._members.is_live(accused) and incarnation == self._members.incarnation_of(accused):
            self._lose(accused, why, tell=False)

    def _expire(self, peer: int, line: Line) -> None:
        if line.link.peer_left:
            self.remove(peer, PeerLost(peer, "it has left"))
        else:
            self.give_up(peer, self._reasons.get(peer, "its connection dropped and could not be replaced"))

    def _given_up_by(self, peer: int) -> None:
        if self._members.expelled_by(peer):
            self.fail(Expelled(f"rank {self._members.rank} was given up by rank {peer}; it can join again"))
        elif self._members.is_live(peer):
            self._lose(peer, "it cannot hear this rank")

    def _lose(self, peer: int, why: str, *, tell: bool = True) -> None:
        """Give a peer up, and let the others know."""
        incarnation = self._members.incarnation_of(peer)
        self._members.gone(peer, Status.LOST, why)
        self._members.forget(peer, incarnation)
        self.remove(peer, PeerLost(peer, why))
        if tell:
            for other in self._members.others():
                self._tell(other, LOST, {"peer": peer, "incarnation": incarnation, "why": why})
        self._events.lost(peer, why)

    def remove(self, peer: int, error: ExchangeError) -> None:
        """Let go of a line; what was to be sent settles with ``error``."""
        line = self.lines.pop(peer, None)
        if line is not None:
            self._detach(line)
            line.link.abandon(error)

    def fail(self, error: ExchangeError) -> None:
        """Go on without anybody: expelled, or broken by a defect."""
        self.error = self.error or error
        for peer in list(self.lines):
            if self._members.is_live(peer):
                self._members.gone(peer, Status.LOST, str(error))
            self.remove(peer, error)
        self._events.failed(self.error)

    # Leaving

    def departed(self, peer: int, line: Line) -> None:
        """A peer has taken leave; it closes the connection when it has everything."""
        line.deadline = time.monotonic() + PARTING
        self._members.gone(peer, Status.LEFT, "it has left")
        self._members.forget(peer, self._members.incarnation_of(peer))
        self._events.departed(peer)

    def take_leave(self) -> None:
        """Say good-bye after all that is queued."""
        self.closing = time.monotonic() + PARTING
        self.dialler.hang_up()
        for peer, line in list(self.lines.items()):
            if line.socket is None:
                self.remove(peer, ExchangeError("the mesh was closed"))
            else:
                line.link.leave()
                self.unwritten.add(peer)

    @property
    def parted(self) -> bool:
        """Whether everything is sent and confirmed, or time is over, since `take_leave`."""
        connected = [line for line in self.lines.values() if line.socket is not None]
        return time.monotonic() > self.closing or all(line.link.idle or line.link.peer_left for line in connected)

    def hang_up(self) -> None:
        """Call nobody any more; every call has ended then."""
        self.dialler.hang_up()
        self.dialler.join()

    def close(self) -> None:
        """Let go of all connections."""
        for line in self.lines.values():
            line.link.abandon(ExchangeError("the mesh was closed"))
            if line.socket is not None:
                line.socket.close()

    def _tell(self, peer: int, kind: str, header: dict[str, object]) -> None:
        self.post(peer, Message(encode_head(kind, header), [], Sent()))
