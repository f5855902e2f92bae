"""Notices that links have recovered, by a few passes of the plan that a job used before they became slower.

A plan that avoids a slow link does not show that the link is as fast as before; nor does one whose connections are
paced for it. The former plan does, within two passes. A measurement of the links would pause training for seconds.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_autosync.strategy.tuning.pass_times import PassTimes

if TYPE_CHECKING:
    from lightning_autosync.strategy.resolution import Resolution

LEAST = 30
"""Passes from the beginning of one excursion to that of the next, at least."""
SHARE = 0.02
"""Share of a job's time that excursions may take. The former plan may be many times as slow as the present one. Then
they are rarer."""
_REST = 3
"""Passes from the beginning of one excursion to that of the next, at least, as a multiple of those during which the
former plan is opened: that takes CPU time."""
_PASSES = 2
"""Passes of an excursion. Only the last one counts: in the first one, buffers and connections are new."""
_SLOWEST = 5
"""Largest ratio of the earlier plan's time after the change to that before. A slower one would hold the training up,
and excursions would be so rare that measurements notice a recovery sooner."""


@dataclass(frozen=True)
class FormerPlan:
    """A plan, and its times before and after links became slower.

    Attributes:
        resolution: the plan, with the links as they were then. Its connections have the paces of these.
        usual: times of a pass before the change.
        slowed: times of a pass after it.
    """

    resolution: Resolution
    usual: PassTimes
    slowed: PassTimes

    @property
    def is_bearable(self) -> bool:
        """Whether its passes on slow links are short enough for excursions."""
        return self.slowed.period <= _SLOWEST * self.usual.period


class Excursions:
    """Decides when the former plan synchronizes passes, and whether their times show that links have recovered.

    All ranks give it the same times, so all decide alike. The engine of the former plan is opened for each excursion,
    and closed after it: a job on slow links may last for days, and would keep a second set of buffers all that time.

    Args:
        former: the plan; None if there is none, so that no excursion is due.
        warm_up: number of passes at the beginning of tuning, which serve for predictions.

    Attributes:
        under_way: whether the former plan is being opened, or synchronizes passes whose times are not known yet.
    """

    def __init__(self, former: FormerPlan | None, warm_up: int = 0) -> None:
        self._plan = former
        self._begun, self._next, self._patience = 0, max(LEAST, warm_up + 1), 1
        self._cost = _PASSES * former.slowed.period if former is not None else 0.0
        self._left = 0
        self._present: list[float] = []
        self._former: list[PassTimes] = []
        self.under_way = False

    def is_due(self, passes: int, present: float) -> bool:
        """Whether the next excursion may begin.

        Args:
            passes: number of passes so far.
            present: usual seconds of a pass of the present plan; NaN if they are not known yet.
        """
        if self._plan is None or passes < self._next or self.under_way:
            return False
        # Before the first excursion, its passes are expected to take as long as right after the change.
        return bool(self._begun) or passes * SHARE * present >= self._cost - _PASSES * present

    def begin(self, passes: int) -> None:
        """Begin an excursion after so many passes: the former plan is being opened."""
        self._begun, self.under_way = passes, True
        self._present, self._former = [], []

    def opened(self) -> None:
        """Let the former plan, which is open, synchronize the passes that are chosen next."""
        self._left = _PASSES

    def give_up(self) -> None:
        """Make no more excursions, because the former plan cannot be opened."""
        self._plan, self.under_way = None, False

    def following(self) -> bool:
        """Choose the plan of the next pass; returns whether it is the former plan, otherwise it is the present one."""
        former = self._left > 0
        self._left -= former
        return former

    def record(self, former: bool, times: PassTimes) -> str:
        """Record the times of a pass for which `following` returned ``former``.

        Returns:
            Why links should be measured again; empty if they need not.
        """
        if not former:
            self._present.append(times.period)
            return ""
        self._former.append(times)
        return self._end() if len(self._former) == _PASSES else ""

    def _end(self) -> str:
        assert self._plan is not None
        self.under_way = False
        present = statistics.median(self._present)
        cost = sum(each.period - present for each in self._former)
        usual, slowed, now = map(self._comparable, (self._plan.usual, self._plan.slowed, self._former[-1]))
        recovered = now < (usual + slowed) / 2
        if recovered:  # links that have changed end these excursions; if they have not, this one was in vain
            self._patience *= 2
        passes = max(LEAST, _REST * len(self._present), round(cost / (SHARE * present)))
        self._next = self._begun + self._patience * passes
        told = (
            f"steps with the earlier plan are fast again: {now:.3g} s, as against {slowed:.3g} s after links became "
            f"slower and {usual:.3g} s before"
        )
        return told if recovered else ""

    def _comparable(self, times: PassTimes) -> float:
        """Seconds of a pass, if its computation had taken as long as before the change."""
        assert self._plan is not None
        return times.period - (times.compute - self._plan.usual.compute)
