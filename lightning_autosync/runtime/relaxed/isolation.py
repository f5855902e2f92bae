"""No set of workers may go on averaging among itself only, apart from the rest."""

from __future__ import annotations

from collections.abc import Collection, Sequence

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
        self._models = 0
        self._parent: dict[int, int] = {}

    def must_bridge(self, active: Collection[int], size: int) -> bool:
        """Whether the next group, of ``size`` members, may leave no component of the ``active`` workers out."""
        if self.bound is None or self._models + size < self.bound * len(active):
            return False
        return len({self.component(rank) for rank in active}) > 1

    def component(self, rank: int) -> int:
        """A name that ``rank`` shares with all workers it is connected to."""
        while (above := self._parent.get(rank, rank)) != rank:
            rank = above
        return rank

    def record(self, members: Sequence[int], active: Collection[int]) -> None:
        """Count a group that was formed while ``active`` workers took part."""
        self._models += len(members)
        first = self.component(members[0])
        for member in members[1:]:
            self._parent[self.component(member)] = first
        if self.bound is not None and self._models >= self.bound * len(active):
            self._models = 0
            self._parent = {}

    def state(self) -> dict[str, object]:
        """Plain data; see :meth:`restore`."""
        return {"models": self._models, "parents": sorted(self._parent.items())}

    def restore(self, models: int, parents: Sequence[tuple[int, int]]) -> None:
        """Continue from what :meth:`state` returned."""
        self._models = models
        self._parent = dict(parents)
