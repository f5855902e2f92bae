"""The workers of one node that push one sum: who pushes, and what the others have handed over."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_autosync.relaxed.server.gradients import Gradients


class Node:
    """Pure bookkeeping of the worker ``rank``; the lowest worker that still trains leads.

    Args:
        rank: the own rank.
        members: the workers of the node, the own included.
    """

    def __init__(self, rank: int, members: Iterable[int]) -> None:
        self._rank = rank
        self._present = set(members)
        self._epoch = 0
        self._finished: dict[int, int] = {}
        self._contributions: dict[int, tuple[int, Gradients]] = {}

    @property
    def epoch(self) -> int:
        """Barriers passed."""
        return self._epoch

    @property
    def active(self) -> list[int]:
        """Those that push before the next barrier, ascending."""
        return sorted(rank for rank in self._present if self._finished.get(rank) != self._epoch)

    @property
    def leader(self) -> int:
        """Who pushes; the own rank if nobody is active."""
        return min(self.active, default=self._rank)

    @property
    def others(self) -> list[int]:
        """The other workers of the node that are there."""
        return sorted(self._present - {self._rank})

    def hand_over(self, rank: int, step: int, gradients: Gradients) -> None:
        """A member's gradients of a step, which may be ahead of or behind the own one."""
        self._contributions[rank] = step, gradients

    def finished(self, rank: int, epoch: int) -> None:
        """A member pushes nothing more before the barrier that ends ``epoch``."""
        self._finished[rank] = epoch

    def absent(self, rank: int) -> None:
        """A member is gone."""
        self._present.discard(rank)
        self._contributions.pop(rank, None)

    def behind(self, step: int) -> list[int]:
        """Members that wait for the result of a step before ``step``: their leader was lost before it told them."""
        late = [rank for rank, (theirs, _) in self._contributions.items() if theirs < step]
        for rank in late:
            del self._contributions[rank]
        return sorted(late)

    def gather(self, step: int, own: Gradients) -> dict[int, Gradients] | None:
        """All active members' gradients of a step by ascending rank; None while some are missing."""
        others = [rank for rank in self.active if rank != self._rank]
        if any(self._contributions.get(rank, (-1,))[0] != step for rank in others):
            return None
        given = {rank: self._contributions.pop(rank)[1] for rank in others}
        return dict(sorted({**given, self._rank: own}.items()))

    def pass_barrier(self, step: int) -> None:
        """All present members are active again, from ``step`` on."""
        self._epoch += 1
        self._contributions = {rank: made for rank, made in self._contributions.items() if made[0] >= step}
