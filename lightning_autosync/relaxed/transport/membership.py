"""Which processes belong to a mesh. Pure bookkeeping: incarnations, and who leaves when two disagree.

A process that comes back is a new incarnation; what an earlier one says is void. When two processes cannot talk to
each other, the one of higher rank leaves: every process applies this rule by itself, so all end with the same view,
and rank 0, which coordinates, outlives every dispute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

from lightning_autosync.relaxed.transport.handshake import EXPELLED, JOIN, RESUME, STALE, WAIT, WELCOME, Hello


class Status(Enum):
    """How a peer stands."""

    UNKNOWN = "unknown"
    CONNECTED = "connected"
    BROKEN = "broken"
    """Its connection dropped and is being replaced."""
    LOST = "lost"
    LEFT = "left"


_LIVE = (Status.CONNECTED, Status.BROKEN)


class Membership:
    """The peers of ``rank`` in a mesh of ``size`` processes."""

    def __init__(self, rank: int, size: int, incarnation: int) -> None:
        self.rank, self.size, self.incarnation = rank, size, incarnation
        self.connecting: dict[int, tuple[str, int]] = {}
        """Peers that are being called for the first time, and where."""
        self._known: dict[int, int] = {}
        self._status = {peer: Status.UNKNOWN for peer in range(size) if peer != rank}
        self._incarnations = dict.fromkeys(self._status, 0)
        self._reasons: dict[int, str] = {}

    def status(self, peer: int) -> Status:
        return self._status[peer]

    def incarnation_of(self, peer: int) -> int:
        """The latest incarnation known; 0 if none is."""
        return self._incarnations[peer]

    def reason(self, peer: int) -> str:
        """Why the peer is not there."""
        return self._reasons.get(peer, "it was never connected")

    def is_live(self, peer: int) -> bool:
        return self._status[peer] in _LIVE

    @property
    def live(self) -> frozenset[int]:
        """The own rank, and those of the peers that are neither lost nor gone."""
        return frozenset({self.rank, *(peer for peer in self._status if self.is_live(peer))})

    @property
    def missing(self) -> list[int]:
        """Peers that were never heard of."""
        return [peer for peer, status in self._status.items() if status is Status.UNKNOWN]

    def incarnations(self) -> dict[str, int]:
        """The live peers' incarnations, as JSON data."""
        return {str(peer): self._incarnations[peer] for peer in self.others()}

    def learn(self, live: Mapping[str, int]) -> None:
        """A peer has told who is live."""
        for peer, incarnation in live.items():
            self._known[int(peer)] = max(incarnation, self._known.get(int(peer), 0))

    def forget(self, peer: int, incarnation: int) -> bool:
        """This incarnation of a peer is not live any more; returns whether it was thought to be."""
        found = 0 < self._known.get(peer, 0) <= incarnation
        if found:
            del self._known[peer]
        return found

    @property
    def unmet(self) -> list[int]:
        """Peers that others count as live, and that are not connected here."""
        return [peer for peer in self._status if peer in self._known and not self.is_live(peer)]

    def judge(self, hello: Hello) -> str:
        """What to answer a caller that knows the secret."""
        if hello.rank not in self._status:
            return EXPELLED
        known = self._incarnations[hello.rank]
        if hello.incarnation < known:
            return EXPELLED
        if hello.target not in (0, self.incarnation):
            return STALE
        if hello.purpose == JOIN:
            # Of two that call each other the lower rank's call counts; unless it goes to an address of the past.
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
        """The peer is lost or has left."""
        self._status[peer], self._reasons[peer] = status, why

    def believes(self, reporter: int, accused: int, incarnation: int) -> bool:
        """Whether a report that ``accused`` is lost holds here too."""
        if accused == self.rank:
            return reporter < accused and incarnation == self.incarnation
        known = accused in self._status and self.is_live(accused) and incarnation == self._incarnations[accused]
        return known and reporter < accused

    def expelled_by(self, peer: int) -> bool:
        """Whether this process must leave because ``peer`` has given it up; else it is the peer that leaves.

        Rank 0 outlives every dispute; of the last two, whoever was given up leaves.
        """
        return peer < self.rank or (self.rank != 0 and self.live <= {self.rank, peer})

    def others(self, *excepted: int) -> Iterable[int]:
        """Live peers."""
        return sorted(self.live - {self.rank, *excepted})
