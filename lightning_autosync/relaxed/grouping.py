"""Groups of waiting workers: which workers average next, with what weights, and how often.

All code here is pure: nothing sends, waits, or reads a clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from networkx.utils import UnionFind

from lightning_autosync.plan import Consistency

BOUND = 10
"""Steps, averaged over workers, within which groups must connect all workers."""


class IsolationGuard:
    """The rule of SDPipe (VLDB 2023): every ``bound`` steps per worker, the groups must form one connected graph.

    The guard counts the models in groups and joins the members of each group. The group with which the count reaches
    ``bound`` times the number of active workers must bridge the remaining components; then a new window begins. Any
    sequence of twice that many models therefore connects the active workers.

    Args:
        bound: steps per worker; None never forces a group.
    """

    def __init__(self, bound: int | None = BOUND) -> None:
        self.bound = bound
        self._window = _Window()
        self._before = _Window()
        """The previous window, kept because one of its groups may still turn out to be broken."""

    def must_bridge(self, active: Collection[int], size: int) -> bool:
        """Whether the next group, of ``size`` members, must include every component of the ``active`` workers."""
        if self.bound is None or self._window.models + size < self.bound * len(active):
            return False
        return len({self.component(rank) for rank in active}) > 1

    def component(self, rank: int) -> int:
        """A number that is equal for all workers in the same component as ``rank``."""
        found: int = self._window.joined[rank]
        return found

    def record(self, number: int, members: Sequence[int], active: Collection[int]) -> None:
        """Count the group ``number``, formed while the workers ``active`` took part."""
        if self.bound is None:
            return
        self._window.add(number, members)
        if self._window.models >= self.bound * len(active):
            self._before, self._window = self._window, _Window()

    def retract(self, number: int) -> None:
        """Forget the group ``number``, which broke and joined nobody; a second call has no effect.

        If its window has just ended, that window continues with the groups since. Groups of older windows still count,
        because a complete window has connected all workers since.
        """
        if number in self._window.groups:
            self._window = _Window(self._window.without(number), self._window.base)
        elif number in self._before.groups:
            groups = self._before.without(number) | self._window.groups
            self._window, self._before = _Window(groups, self._before.base), _Window()

    def state(self) -> dict[str, object]:
        """Plain data; see :meth:`restore`. The parent of a joined rank is the lowest rank of its set."""
        joined = [(rank, min(ranks)) for ranks in self._window.joined.to_sets() for rank in ranks if rank > min(ranks)]
        return {"models": self._window.models, "parents": sorted(joined)}

    def restore(self, models: int, parents: Sequence[tuple[int, int]]) -> None:
        """Load the state that :meth:`state` returned."""
        base = _Base(models, tuple((rank, above) for rank, above in parents))
        self._window, self._before = _Window({}, base), _Window()


def unconnected_windows(groups: Sequence[Sequence[int]], workers: int, bound: int = BOUND) -> tuple[int, int]:
    """The number of windows that do not connect all ``workers``, and the number of windows.

    A window begins at each group and ends when groups have averaged twice ``bound`` models per worker.
    """
    unconnected = windows = end = models = 0
    for begin, first in enumerate(groups):
        while end < len(groups) and models < 2 * bound * workers:
            models += len(groups[end])
            end += 1
        if models < 2 * bound * workers:
            break
        joined = UnionFind()
        for members in groups[begin:end]:
            joined.union(*members)
        windows += 1
        unconnected += len({joined[rank] for rank in range(workers)}) > 1
        models -= len(first)
    return unconnected, windows


class _Base(NamedTuple):
    """The state of a window in a checkpoint: number of models, and joined ranks."""

    models: int = 0
    parents: tuple[tuple[int, int], ...] = ()


class _Window:
    """Groups by number, the ranks that they joined, and the number of models in them."""

    def __init__(self, groups: dict[int, tuple[int, ...]] | None = None, base: _Base | None = None) -> None:
        self.base = base or _Base()
        self.models, self.joined = self.base.models, UnionFind()
        for pair in self.base.parents:
            self.joined.union(*pair)
        self.groups: dict[int, tuple[int, ...]] = {}
        for number, members in (groups or {}).items():
            self.add(number, members)

    def add(self, number: int, members: Sequence[int]) -> None:
        self.groups[number] = tuple(members)
        self.models += len(members)
        self.joined.union(*members)

    def without(self, number: int) -> dict[int, tuple[int, ...]]:
        return {other: members for other, members in self.groups.items() if other != number}


class Grouped(NamedTuple):
    """A group of workers to average now.

    Attributes:
        members: ranks, in the order in which they began to wait.
        bridging: whether the group had to connect all components (see :class:`IsolationGuard`).
        number: number of the group, for :meth:`Grouping.broken`.
    """

    members: tuple[int, ...]
    bridging: bool
    number: int


class Grouping:
    """Workers that wait for a group, first come, first served.

    A group closes with ``size`` members, or with all active workers if there are fewer. A single active worker
    continues at once. With a ``wait``, a group closes with the workers that are there when the first has waited that
    long. A group that must bridge components (:class:`~lightning_autosync.relaxed.grouping.IsolationGuard`) takes the
    first worker of each, whatever its size, and waits for them without limit.

    Args:
        size: members per group (P); None takes all active workers.
        wait: seconds; None waits until the group is full.
        isolation: the rule that keeps workers connected.
    """

    def __init__(self, size: int | None, wait: float | None = None, isolation: IsolationGuard | None = None) -> None:
        self.size = size
        self.wait = wait
        self.isolation = isolation or IsolationGuard()
        self._since: dict[int, float] = {}
        self._formed = 0

    @classmethod
    def of(cls, settings: Consistency) -> Grouping:
        """The grouping for a consistency of mode ``partial_reduce``."""
        return cls(settings.group_size, settings.wait, IsolationGuard(settings.isolation or BOUND))

    @property
    def waiting(self) -> tuple[int, ...]:
        """Waiting ranks, in the order in which they came."""
        return tuple(self._since)

    def add(self, rank: int, now: float) -> None:
        """Queue ``rank``, which has made its step; ``now`` is in seconds from any origin."""
        self._since.setdefault(rank, now)

    def discard(self, rank: int) -> None:
        """Remove ``rank`` from the queue."""
        self._since.pop(rank, None)

    def take(self, active: Collection[int], now: float) -> Grouped | None:
        """Remove the next group from the queue and return it; None if it is not complete yet.

        Args:
            active: ranks that wait or will wait, unless they are lost or finish.
            now: current time in seconds.
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
        """Note that a group's average failed, so that it connected nobody; a second call has no effect."""
        self.isolation.retract(number)

    def deadline(self, now: float) -> float | None:
        """Time for the next call of :meth:`take` if no event comes first; None if there is no need."""
        if self.wait is None or not self._since or self._overdue(now):
            return None
        return next(iter(self._since.values())) + self.wait

    def _overdue(self, now: float) -> bool:
        return self.wait is not None and now >= next(iter(self._since.values())) + self.wait

    def _bridge(self, active: Collection[int]) -> list[int] | None:
        """The first waiting worker of every component; None if a component has no waiting worker."""
        first: dict[int, int] = {}
        for rank in self._since:
            first.setdefault(self.isolation.component(rank), rank)
        needed = {self.isolation.component(rank) for rank in active}
        return list(first.values()) if needed <= first.keys() else None


DECAY = 0.9
"""Factor on an iteration's mass for each later iteration."""


def constant_weights(members: int) -> list[float]:
    """Equal weights for ``members`` members."""
    return [1.0 / members] * members


def sample_weights(samples: Sequence[int]) -> list[float]:
    """Weights in proportion to the samples that each member has seen; equal weights if there are no samples."""
    total = sum(samples)
    return [count / total for count in samples] if total else constant_weights(len(samples))


def dynamic_weights(iterations: Sequence[int], decay: float = DECAY) -> list[float]:
    """Smaller weights for members with older models (Partial Reduce, SIGMOD 2021, dynamic weights).

    A model that is ``age - 1`` iterations behind the newest gets mass ``decay ** (age - 1) * (1 - decay)``, as in a
    moving average over iterations. The mass of ages without a member goes to the newest age, and members of equal age
    share their mass. If many new members share one age, a single stale member could outweigh each of them. The result
    is therefore projected onto weights that do not grow with age (isotonic regression).

    Args:
        iterations: iteration of each member's model.
        decay: factor between 0 and 1.

    Returns:
        One weight per member; the weights sum to 1.
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
    """The weight of a member, by age. Neighbouring ages are pooled until no weight exceeds its predecessor."""
    pools: list[tuple[float, int, int]] = []  # mass, members, ages
    for mass, members in zip(masses, sharing, strict=True):
        pool = (mass, members, 1)
        while pools and pool[0] / pool[1] > pools[-1][0] / pools[-1][1]:
            before = pools.pop()
            pool = (before[0] + pool[0], before[1] + pool[1], before[2] + pool[2])
        pools.append(pool)
    return [mass / members for mass, members, ages in pools for _ in range(ages)]


_MOST_GROWTH = 2
"""Largest factor by which the period changes at once, because a single slow exchange is weak evidence."""
_MEMORY = 0.5
"""Weight of the old value in moving averages of times."""


class AdaptivePeriod:
    """Adapts the period to the shortest one at which averaging takes at most a given share of the time.

    With steps of ``s`` seconds and exchanges of ``x`` seconds, a period of ``H`` steps spends the share
    ``x / (H s + x)`` on exchanges.

    Args:
        period: initial number of steps between averages.
        overhead: largest share of the time for exchanges, between 0 and 1.
        longest: largest period in steps.
    """

    def __init__(self, period: int, overhead: float, longest: int) -> None:
        self.period = period
        self.overhead = overhead
        self.longest = longest
        self._step_time = 0.0
        self._exchange_time = 0.0
        self._round: list[tuple[float, float]] = []

    def report(self, step_time: float, exchange_time: float) -> None:
        """Note one worker's mean seconds per step since the last average, and the seconds that this average took."""
        if step_time > 0 and exchange_time > 0:
            self._round.append((step_time, exchange_time))

    def next_period(self) -> int:
        """The number of steps until the next average, from the reports of this round."""
        if self._round:
            slowest = max(step for step, _ in self._round)
            # The last worker to come did not wait for others, so the shortest time is that of the exchange alone.
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
        """Load the state that :meth:`state` returned."""
        self.period, self._step_time, self._exchange_time = period, step_time, exchange_time


def _follow(average: float, value: float) -> float:
    return value if average == 0 else _MEMORY * average + (1 - _MEMORY) * value
