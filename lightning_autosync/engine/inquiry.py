"""Which rank is at fault, from what rank 0 knows of the others; it opens no connection itself."""

from __future__ import annotations

from typing import NamedTuple

SILENT = "it does not answer: its process is stopped, or its machine is cut off"
ENDED = "it ended without an error while other ranks continued"


class Verdict(NamedTuple):
    """The rank at fault and the reason; the rank is None if all ranks answer.

    It is ``announced`` if that rank told its own error, so that it may still come to what follows an error.
    """

    rank: int | None
    why: str
    announced: bool = False


class Inquiry:
    """Rank 0's knowledge of the other ranks, from which the verdict follows. Times are times of `time.monotonic`.

    Args:
        ranks: the other ranks.
        answer_timeout: seconds after which a rank that has not answered counts as silent.
    """

    def __init__(self, ranks: set[int], answer_timeout: float) -> None:
        self.present = ranks
        self._answer_timeout = answer_timeout
        self._left: set[int] = set()
        self._pinged: dict[int, float] = {}
        self._waiting: dict[int, float | None] = {}
        self._requested: float | None = None
        self._first = 0
        self._late = False

    def ranks_to_ping(self, now: float) -> list[int]:
        """Present ranks without a pending ping, sorted; they count as pinged from ``now`` on."""
        fresh = sorted(self.present - self._pinged.keys())
        self._pinged.update(dict.fromkeys(fresh, now))
        return fresh

    def request(self, now: float, late: bool, rank: int) -> None:
        """Note that ``rank`` wants a verdict; ``late`` if it has waited until its timeout."""
        if self._requested is None:
            self._requested, self._first = now, rank
        self._late = self._late or late

    def answered(self, rank: int, waiting: float | None) -> None:
        """Note an answer: ``rank`` has waited ``waiting`` seconds for other ranks; None if it does not wait."""
        self._pinged.pop(rank, None)
        self._waiting[rank] = waiting

    def leave(self, rank: int) -> None:
        """Note that a rank has ended without an error."""
        self.forget(rank)
        self._left.add(rank)

    def forget(self, rank: int) -> None:
        """Note that a rank's connection is closed."""
        self.present.discard(rank)
        self._pinged.pop(rank, None)
        self._waiting.pop(rank, None)

    @property
    def requested(self) -> bool:
        """Whether some rank has asked for a verdict."""
        return self._requested is not None

    def silent(self, now: float) -> list[int]:
        """Ranks that have not answered a ping in time, sorted."""
        # A copy, because another thread may change the dictionary meanwhile.
        pinged = self._pinged.copy()
        return sorted(rank for rank, since in pinged.items() if now - since >= self._answer_timeout)

    def verdict(self, now: float) -> Verdict | None:
        """The verdict; None if no rank has asked for one, or while answers may still come."""
        if self._requested is None:
            return None
        silent = self.silent(now)
        if len(silent) < len(self._pinged):
            return None
        if silent:
            others = f"; ranks {', '.join(map(str, silent[1:]))} do not answer either" if silent[1:] else ""
            return Verdict(silent[0], SILENT + others)
        # A dying process closes its connections one by one, and the one to rank 0 may be the last.
        if now - self._requested < self._answer_timeout / 4:
            return None
        if self._left:
            return Verdict(min(self._left), ENDED)
        elsewhere = sorted(rank for rank, waiting in self._waiting.items() if waiting is None)
        if self._late and elsewhere:
            return Verdict(
                elsewhere[0], "it is alive, but has not reached this collective call: it is busy or stuck elsewhere"
            )
        if self._late:
            different = "all ranks answer, but they wait in different collective calls"
            return Verdict(None, f"{different}; rank {self._first} timed out first")
        return Verdict(None, f"all ranks answer; the connection of rank {self._first} failed first")
