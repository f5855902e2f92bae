"""Whose gradients a server waits for: vector clocks with bounded staleness (SSP; Ho et al., NIPS 2013)."""

from __future__ import annotations

from collections.abc import Iterable


class StalenessClock:
    """How many steps of each party a server has applied, and who may read.

    A party that has pushed ``c`` steps may read, and so begin its step ``c``, once every party in the clock has
    pushed at least ``c - staleness``. So what it reads lacks no gradient of a step before ``c - staleness``, and no
    two parties are ever more than ``staleness + 1`` pushes apart. With ``staleness`` 0 all march in step; with None
    nobody waits.

    Args:
        parties: the workers, or the nodes if a node pushes one sum.
        staleness: steps that a party may run ahead of the slowest; None for no limit.
    """

    def __init__(self, parties: Iterable[int], staleness: int | None) -> None:
        self.staleness = staleness
        self._steps = dict.fromkeys(sorted(parties), 0)
        self._progress = 0.0
        self._furthest = 0

    @property
    def parties(self) -> tuple[int, ...]:
        """Those that are waited for, ascending."""
        return tuple(self._steps)

    @property
    def steps(self) -> dict[int, int]:
        """Steps pushed, by party."""
        return dict(self._steps)

    @property
    def progress(self) -> float:
        """Steps that the parameters stand for: each push is a share of one, by the parties of its time."""
        return self._progress

    @property
    def slowest(self) -> int:
        """Fewest steps of any party; if none is left, the most that there ever were."""
        return min(self._steps.values(), default=self._furthest)

    def __contains__(self, party: int) -> bool:
        return party in self._steps

    def advance(self, party: int) -> int:
        """Count one pushed step; returns the party's steps.

        Raises:
            KeyError: the party is not in the clock.
        """
        self._steps[party] += 1
        self._furthest = max(self._furthest, self._steps[party])
        self._progress += 1.0 / len(self._steps)
        return self._steps[party]

    def may_read(self, party: int) -> bool:
        """Whether the party may begin its next step now; one that is not in the clock always may."""
        if self.staleness is None or party not in self._steps:
            return True
        return self.slowest >= self._steps[party] - self.staleness

    def drop(self, party: int) -> None:
        """Wait for a party no longer: it is lost, or its data has ended."""
        self._steps.pop(party, None)

    def add(self, party: int) -> int:
        """Take in a party that came (back); it begins with the slowest. Returns its steps."""
        self._steps[party] = self._steps.get(party, self.slowest)
        self._steps = dict(sorted(self._steps.items()))
        return self._steps[party]

    def align(self) -> int:
        """All parties stand at a barrier: they go on from the furthest step ever, which is returned."""
        self._steps = dict.fromkeys(self._steps, self._furthest)
        return self._furthest

    def restore(self, step: int, progress: float) -> None:
        """Begin where a checkpoint ended, at which all stood at a barrier."""
        self._steps = dict.fromkeys(self._steps, step)
        self._furthest, self._progress = step, progress
