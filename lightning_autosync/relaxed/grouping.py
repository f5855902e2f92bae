"""Which waiting workers average next, how much each counts, and how often.

Pure: nothing here sends, waits, or looks at a clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from lightning_autosync.plan import Consistency

BOUND = 10
"""Steps, on average over the workers, within which groups must connect all of them."""


class IsolationGuard:
    """The rule of SDPipe (VLDB 2023): every ``bound`` steps a worker, the groups so far must form one connected graph.

    It counts models that went into groups and joins the members of each group. The group with which the count reaches
    ``bound`` times the number of active workers must bridge the components that are left; then all begins anew. So a
    window of twice that many models always connects the active workers.

    Args:
        bound: steps a worker; None never forces a group.
    """

    def __init__(self, bound: int | None = BOUND) -> None:
        self.bound = bound
        self._window = _Window()
        self._before = _Window()
        """The window before, of which a group may still turn out to be broken."""

    def must_bridge(self, active: Collection[int], size: int) -> bool:
        """Whether the next group, of ``size`` members, may leave no component of the ``active`` workers out."""
        if self.bound is None or self._window.models + size < self.bound * len(active):
            return False
        return len({self.component(rank) for rank in active}) > 1

    def component(self, rank: int) -> int:
        """A name that ``rank`` shares with all workers it is connected to."""
        return self._window.joined.component(rank)

    def record(self, number: int, members: Sequence[int], active: Collection[int]) -> None:
        """Count the group ``number``, formed while ``active`` workers took part."""
        if self.bound is None:
            return
        self._window.add(number, members)
        if self._window.models >= self.bound * len(active):
            self._before, self._window = self._window, _Window()

    def retract(self, number: int) -> None:
        """Forget the group ``number``, which broke and has joined nobody; may be called again.

        If its window is over, that one goes on with what came since. What broke before that window counts: another
        one has connected all since.
        """
        if number in self._window.groups:
            self._window = _Window(self._window.without(number), self._window.base)
        elif number in self._before.groups:
            groups = self._before.without(number) | self._window.groups
            self._window, self._before = _Window(groups, self._before.base), _Window()

    def state(self) -> dict[str, object]:
        """Plain data; see :meth:`restore`."""
        return {"models": self._window.models, "parents": sorted(self._window.joined.parents.items())}

    def restore(self, models: int, parents: Sequence[tuple[int, int]]) -> None:
        """Continue from what :meth:`state` returned."""
        base = _Base(models, tuple((rank, above) for rank, above in parents))
        self._window, self._before = _Window({}, base), _Window()


def windows_apart(groups: Sequence[Sequence[int]], workers: int, bound: int = BOUND) -> tuple[int, int]:
    """How many windows leave some of the ``workers`` apart, and how many windows there are.

    A window begins with any group and ends when twice ``bound`` models a worker have gone into groups.
    """
    apart = windows = end = models = 0
    for begin, first in enumerate(groups):
        while end < len(groups) and models < 2 * bound * workers:
            models += len(groups[end])
            end += 1
        if models < 2 * bound * workers:
            break
        joined = _Joined()
        for members in groups[begin:end]:
            joined.join(members)
        windows += 1
        apart += len({joined.component(rank) for rank in range(workers)}) > 1
        models -= len(first)
    return apart, windows


class _Base(NamedTuple):
    """The state of a window in a checkpoint: models counted, and which ranks were joined."""

    models: int = 0
    parents: tuple[tuple[int, int], ...] = ()


class _Joined:
    """Sets of ranks that are joined with each other."""

    def __init__(self, parents: Iterable[tuple[int, int]] = ()) -> None:
        self.parents = dict(parents)

    def component(self, rank: int) -> int:
        while (above := self.parents.get(rank, rank)) != rank:
            rank = above
        return rank

    def join(self, members: Sequence[int]) -> None:
        first = self.component(members[0])
        for member in members[1:]:
            self.parents[self.component(member)] = first


class _Window:
    """Groups by number, what they have joined, and how many models went into them."""

    def __init__(self, groups: dict[int, tuple[int, ...]] | None = None, base: _Base | None = None) -> None:
        self.base = base or _Base()
        self.models, self.joined = self.base.models, _Joined(self.base.parents)
        self.groups: dict[int, tuple[int, ...]] = {}
        for number, members in (groups or {}).items():
            self.add(number, members)

    def add(self, number: int, members: Sequence[int]) -> None:
        self.groups[number] = tuple(members)
        self.models += len(members)
        self.joined.join(members)

    def without(self, number: int) -> dict[int, tuple[int, ...]]:
        return {other: members for other, members in self.groups.items() if other != number}


class Grouped(NamedTuple):
    """A group of workers to average now.

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
    (:class:`~lightning_autosync.relaxed.grouping.IsolationGuard`) takes the first of every component, whatever
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
        """A group's average failed, so it has connected nobody. May be called again."""
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


DECAY = 0.9
"""Mass that an iteration keeps for each one that came after it."""


def constant_weights(members: int) -> list[float]:
    """The same for each of ``members``."""
    return [1.0 / members] * members


def sample_weights(samples: Sequence[int]) -> list[float]:
    """In proportion to the samples that each member has seen; the same for each if none has seen any."""
    total = sum(samples)
    return [count / total for count in samples] if total else constant_weights(len(samples))


def dynamic_weights(iterations: Sequence[int], decay: float = DECAY) -> list[float]:
    """Less for members whose model is older (Partial Reduce, SIGMOD 2021, dynamic weights).

    A model that is ``age - 1`` iterations behind the newest gets mass ``decay ** (age - 1) * (1 - decay)``, as in a
    moving average over iterations; ages that no member has give theirs to the newest, and members of one age share.
    Where many fresh members share one age, this would let a lone stale one outweigh each of them, so that the result is
    projected onto weights that do not grow with age (isotonic regression).

    Args:
        iterations: of each member's model.
        decay: between 0 and 1.

    Returns:
        One weight a member; they sum to one.
    """
    newest = max(iterations)
    sharing = Counter(newest - iteration + 1 for iteration in iterations)
    ages = sorted(sharing)
    oldest = ages[-1]
    masses = [decay ** (age - 1) * (1 - decay) / (1 - decay**oldest) for age in ages]
    masses[0] += 1.0 - sum(masses)
    weights = dict(zip(ages, _falling(masses, [sharing[age] for age in ages]), strict=True))
    return [weights[newest - iteration + 1] for iteration in iterations]


def _falling(masses: Sequence[float], sharing: Sequence[int]) -> list[float]:
    """For each age, its members' weight: masses shared out, neighbours pooled until none exceeds its predecessor."""
    pools: list[tuple[float, int, int]] = []  # mass, members, ages
    for mass, members in zip(masses, sharing, strict=True):
        pool = (mass, members, 1)
        while pools and pool[0] / pool[1] > pools[-1][0] / pools[-1][1]:
            before = pools.pop()
            pool = (before[0] + pool[0], before[1] + pool[1], before[2] + pool[2])
        pools.append(pool)
    return [mass / members for mass, members, ages in pools for _ in range(ages)]


_MOST_GROWTH = 2
"""Factor by which the period may change at a time: one slow exchange says little."""
_MEMORY = 0.5
"""Weight of the past in the moving averages of times."""


class AdaptivePeriod:
    """The shortest period at which averaging takes no more than a given share of the time.

    With steps of ``s`` seconds and exchanges of ``x``, a period of H spends ``x / (H s + x)`` on exchanges.

    Args:
        period: steps between averages at first.
        overhead: the share of the time that exchanges may take, between 0 and 1.
        longest: the period never exceeds this number of steps.
    """

    def __init__(self, period: int, overhead: float, longest: int) -> None:
        self.period = period
        self.overhead = overhead
        self.longest = longest
        self._step_time = 0.0
        self._exchange_time = 0.0
        self._round: list[tuple[float, float]] = []

    def report(self, step_time: float, exchange_time: float) -> None:
        """One worker's mean seconds a step since the last average, and the seconds that average took."""
        if step_time > 0 and exchange_time > 0:
            self._round.append((step_time, exchange_time))

    def next_period(self) -> int:
        """The period until the next average, from what the slowest worker of this round reported."""
        if self._round:
            slowest = max(step for step, _ in self._round)
            # Whoever came last did not wait, so that the shortest exchange is the one without waiting.
            shortest = min(exchange for _, exchange in self._round)
            self._step_time = _follow(self._step_time, slowest)
            self._exchange_time = _follow(self._exchange_time, shortest)
            self._round = []
            wanted = math.ceil(self._exchange_time * (1 - self.overhead) / (self.overhead * self._step_time))
            lowest, highest = max(1, self.period // _MOST_GROWTH), self.period * _MOST_GROWTH
            self.period = min(max(wanted, lowest), highest, self.longest)
        return self.period

    def state(self) -> dict[str, float]:
        """Plain data; see :meth:`restore`."""
        return {"period": self.period, "step_time": self._step_time, "exchange_time": self._exchange_time}

    def restore(self, period: int, step_time: float, exchange_time: float) -> None:
        """Continue from what :meth:`state` returned."""
        self.period, self._step_time, self._exchange_time = period, step_time, exchange_time


def _follow(average: float, value: float) -> float:
    return value if average == 0 else _MEMORY * average + (1 - _MEMORY) * value
