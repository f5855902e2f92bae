"""How groups will form among workers of given speeds: an event simulation on the same rules that run."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_autosync.relaxed.grouping import Grouped, Grouping


@dataclass(frozen=True)
class Rehearsal:
    """What would happen.

    Attributes:
        groups: in the order of forming.
        steps: of each worker.
        duration: seconds.
        idle: share of the workers' time that is spent waiting for a group to form.
    """

    groups: tuple[Grouped, ...]
    steps: tuple[int, ...]
    duration: float
    idle: float

    @property
    def bridging(self) -> float:
        """Share of the groups that had to connect workers that were apart."""
        return sum(group.bridging for group in self.groups) / len(self.groups)


def rehearse(
    grouping: Grouping, compute: Sequence[Callable[[], float]], groups: int, exchange: float = 0.0
) -> Rehearsal:
    """Let workers step until ``groups`` groups have formed.

    Args:
        grouping: fresh; it is used up.
        compute: for each worker, the seconds of its next step, drawn anew at each call.
        groups: how many to form.
        exchange: seconds that a group's average takes.
    """
    active = range(len(compute))
    steps, waited, since = [0] * len(compute), 0.0, [0.0] * len(compute)
    formed: list[Grouped] = []
    events: list[tuple[float, int]] = [(draw(), rank) for rank, draw in enumerate(compute)]
    heapq.heapify(events)
    now = 0.0
    while len(formed) < groups:
        deadline = grouping.deadline(now)
        if events and (deadline is None or events[0][0] <= deadline):
            now, rank = heapq.heappop(events)
            steps[rank] += 1
            since[rank] = now
            grouping.add(rank, now)
        elif deadline is not None:
            now = deadline
        while group := grouping.take(active, now):
            formed.append(group)
            for rank in group.members:
                waited += now - since[rank]
                heapq.heappush(events, (now + exchange + compute[rank](), rank))
    waited += sum(now - since[rank] for rank in grouping.waiting)
    return Rehearsal(tuple(formed), tuple(steps), now, waited / (now * len(compute)))
