"""No set of workers may go on averaging among itself only, apart from the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

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
        """The group ``number`` is broken and has joined nobody; may be told again.

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
    """Where a window of a checkpoint stood: models counted, and who was joined with whom."""

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
