"""Membership of a mesh: incarnations, and the rule for disputes. Pure bookkeeping, without communication.

A process that returns is a new incarnation; messages of earlier incarnations are void. If two processes cannot reach
each other, the one with the higher rank leaves. Every process applies this rule by itself, so all end with the same
view, and rank 0, which coordinates, never has to leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

from lightning_autosync.relaxed.transport.handshake import EXPELLED, JOIN, RESUME, STALE, WAIT, WELCOME, Hello


class Status(Enum):
    """The state of a peer."""

    UNKNOWN = "unknown"
    CONNECTED = "connected"
    BROKEN = "broken"
    """The connection dropped and is being replaced."""
    LOST = "lost"
    LEFT = "left"


_LIVE = (Status.CONNECTED, Status.BROKEN)


class Membership:
    """The peers of ``rank`` in a mesh of ``size`` processes."""

    def __init__(self, rank: int, size: int, incarnation: int) -> None:
        self.rank, self.size, self.incarnation = rank, size, incarnation
        self.connecting: dict[int, tuple[str, int]] = {}
        """Addresses of the peers to which this process is making a first connection, by rank."""
        self._known: dict[int, int] = {}
        self._status = {peer: Status.UNKNOWN for peer in range(size) if peer != rank}
        self._incarnations = dict.fromkeys(self._status, 0)
        self._reasons: dict[int, str] = {}

    def status(self, peer: int) -> Status:
        return self._status[peer]

    def incarnation_of(self, peer: int) -> int:
        """The latest known incarnation; 0 if there is none."""
        return self._incarnations[peer]

    def reason(self, peer: int) -> str:
        """The reason why the peer is not live."""
        return self._reasons.get(peer, "it never connected")

    def is_live(self, peer: int) -> bool:
        return self._status[peer] in _LIVE

    @property
    def live(self) -> frozenset[int]:
        """Ranks of this process and its live peers."""
        return frozenset({self.rank, *(peer for peer in self._status if self.is_live(peer))})

    @property
    def missing(self) -> list[int]:
        """Peers that were never connected, lost or gone."""
        return [peer for peer, status in self._status.items() if status is Status.UNKNOWN]

    def incarnations(self) -> dict[str, int]:
        """Incarnations of the live peers by rank, as JSON data."""
        return {str(peer): self._incarnations[peer] for peer in self.others()}

    def learn(self, live: Mapping[str, int]) -> None:
        """Note the live peers of another process, with their incarnations."""
        for peer, incarnation in live.items():
            self._known[int(peer)] = max(incarnation, self._known.get(int(peer), 0))

    def forget(self, peer: int, incarnation: int) -> bool:
        """Note that this incarnation of a peer is not live any more; returns whether others had counted it as live."""
        found = 0 < self._known.get(peer, 0) <= incarnation
        if found:
            del self._known[peer]
        return found

    @property
    def unmet(self) -> list[int]:
        """Peers that other processes count as live, but that are not connected to this one."""
        return [peer for peer in self._status if peer in self._known and not self.is_live(peer)]

    def judge(self, hello: Hello) -> str:
        """The verdict on a caller that knows the secret."""
        if hello.rank not in self._status:
            return EXPELLED
        known = self._incarnations[hello.rank]
        if hello.incarnation < known:
            return EXPELLED
        if hello.target not in (0, self.incarnation):
            return STALE
        if hello.purpose == JOIN:
            # If two processes call each other, the call of the lower rank counts, unless it goes to an old address.
            called = self.connecting.get(hello.rank)
            both_call = called == (hello.host, hello.port) and self.rank < hello.rank
            return WAIT if both_call or hello.incarnation == known else WELCOME
        if hello.incarnation > known or not self.is_live(hello.rank):
            return EXPELLED
        return WELCOME if hello.purpose == RESUME else WAIT

    def connected(self, peer: int, incarnation: int) -> None:
        self._status[peer], self._incarnations[peer] = Status.CONNECTED, incarnation

    def broken(self, peer: int) -> None:
        self._status[peer] = Status.BROKEN

    def gone(self, peer: int, status: Status, why: str) -> None:
        """Note that the peer is lost or has left."""
        self._status[peer], self._reasons[peer] = status, why

    def believes(self, reporter: int, accused: int, incarnation: int) -> bool:
        """Whether this process accepts a report by ``reporter`` that ``accused`` is lost."""
        if accused == self.rank:
            return reporter < accused and incarnation == self.incarnation
        known = accused in self._status and self.is_live(accused) and incarnation == self._incarnations[accused]
        return known and reporter < accused

    def expelled_by(self, peer: int) -> bool:
        """Whether this process must leave because ``peer`` has given it up; otherwise the peer leaves.

        Rank 0 never leaves. Of the last two processes, the one that was expelled leaves.
        """
        return peer < self.rank or (self.rank != 0 and self.live <= {self.rank, peer})

    def others(self, *excepted: int) -> Iterable[int]:
        """Ranks of live peers except ``excepted``, ascending."""
        return sorted(self.live - {self.rank, *excepted})
