"""Which waiting workers average next. Pure: nothing here sends, waits, or looks at a clock."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from lightning_autosync.plan import Consistency
from lightning_autosync.relaxed.isolation import BOUND, IsolationGuard


class Grouped(NamedTuple):
    """Workers that shall average now.

    Attributes:
        members: ranks, in the order in which they began to wait.
        bridging: whether the group had to connect workers that were apart.
        number: by which the group is told broken (:meth:`Grouping.broken`).
    """

    members: tuple[int, ...]
    bridging: bool
    number: int


class Grouping:
    """Workers that wait for a group, first come, first served.

    A group closes with ``size`` members, or with all active workers if they are fewer; a lone active worker goes on at
    once. With a ``wait``, it closes with whoever is there once the first has waited that long. A group that must bridge
    (:class:`~lightning_autosync.relaxed.isolation.IsolationGuard`) takes the first of every component, whatever
    its size, and is waited for without limit.

    Args:
        size: members of a group (P); None takes all active workers.
        wait: seconds; None waits until the group is full.
        isolation: what keeps workers connected.
    """

    def __init__(self, size: int | None, wait: float | None = None, isolation: IsolationGuard | None = None) -> None:
        self.size = size
        self.wait = wait
        self.isolation = isolation or IsolationGuard()
        self._since: dict[int, float] = {}
        self._formed = 0

    @classmethod
    def of(cls, settings: Consistency) -> Grouping:
        """What a consistency of mode ``partial_reduce`` asks for."""
        return cls(settings.group_size, settings.wait, IsolationGuard(settings.isolation or BOUND))

    @property
    def waiting(self) -> tuple[int, ...]:
        """Ranks that wait, first come first."""
        return tuple(self._since)

    def add(self, rank: int, now: float) -> None:
        """``rank`` has made its step and waits; ``now`` in seconds, from any origin."""
        self._since.setdefault(rank, now)

    def discard(self, rank: int) -> None:
        """``rank`` waits no longer."""
        self._since.pop(rank, None)

    def take(self, active: Collection[int], now: float) -> Grouped | None:
        """The next group, taken off the queue; None if it is not yet time.

        Args:
            active: ranks that wait or will come to wait, unless they are lost or finish.
            now: seconds.
        """
        if not self._since:
            return None
        size = len(active) if self.size is None else min(self.size, len(active))
        bridging = self.isolation.must_bridge(active, size)
        chosen = self._bridge(active) if bridging else []
        if chosen is None or (len(self._since) < size and not self._overdue(now)):
            return None
        rest = [rank for rank in self._since if rank not in chosen]
        chosen += rest[: max(0, size - len(chosen))]
        members = tuple(rank for rank in self._since if rank in chosen)
        for rank in members:
            del self._since[rank]
        self._formed += 1
        self.isolation.record(self._formed, members, active)
        return Grouped(members, bridging, self._formed)

    def broken(self, number: int) -> None:
        """A group's average failed: it has connected nobody. May be told again."""
        self.isolation.retract(number)

    def deadline(self, now: float) -> float | None:
        """When to try :meth:`take` again although nothing happens; None if there is no need to."""
        if self.wait is None or not self._since or self._overdue(now):
            return None
        return next(iter(self._since.values())) + self.wait

    def _overdue(self, now: float) -> bool:
        return self.wait is not None and now >= next(iter(self._since.values())) + self.wait

    def _bridge(self, active: Collection[int]) -> list[int] | None:
        """The first waiting worker of every component; None if one has nobody waiting."""
        first: dict[int, int] = {}
        for rank in self._since:
            first.setdefault(self.isolation.component(rank), rank)
        needed = {self.isolation.component(rank) for rank in active}
        return list(first.values()) if needed <= first.keys() else None
