"""Notices that links have become slower or faster, from the times of passes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from lightning_autosync.strategy.tuning.pass_times import PassTimes

WINDOW = 5
"""Passes of which ranks agree on the median. Ranks exchange a message per window, not per pass."""
CHANGED = 0.1
"""Relative change of a pass that counts, if computation does not explain it."""
UNLIKE = 0.25
"""Relative excess over an earlier step time of the plan up to which links are taken to be as they were then."""
LEAST_CHANGE = 0.005
"""Seconds of such a change. Smaller ones are noise, and would not repay the seconds of a measurement."""
_CONFIRMED = 2
"""Windows in a row that have to show a change, at least. It doubles with each change that the links do not explain."""
_EVIDENCE = 1.0
"""Sum of the relative changes of these windows, at least. A small change has to last longer than a large one, because
the speed of busy machines also drifts, and a measurement of the links pauses training for seconds."""
_SPOT = 10 * WINDOW
"""Passes until links are measured again after a change. The number doubles each time."""
_RARER = 8
"""Factor of that number where excursions show that links have recovered: a measurement sees what these do not."""


class DriftWatch:
    """Compares windows of passes with the first two, and with those right after tuning once that has ended.

    All ranks give it the same times, so all decide alike.

    Args:
        changes: number of earlier changes of the links in this job. After one, the plan may avoid a slow link, so
            passes do not show that it has recovered: links are then measured again from time to time. The more
            changes, the more rarely, and the more passes have to show another change.
        remembered: seconds of a pass in the earlier job whose plan is used; None without one. If passes take much
            longer now, its rates do not hold.
        excursions: whether `Excursions` show that links have recovered. Links are then measured far more rarely.

    Attributes:
        slowing: times of a pass before and after it became slower, if this is the reason that `record` gave last.
    """

    def __init__(self, changes: int = 0, remembered: float | None = None, excursions: bool = False) -> None:
        self._earlier: list[tuple[float, str]] = []
        if remembered is not None:
            self.compare_with(remembered, "in the job whose plan is used")
        self._first: list[PassTimes] = []
        self._usual: PassTimes | None = None
        self._confirmed = _CONFIRMED << max(0, changes - 1)
        self._strikes: list[float] = []
        self._passes = 0
        self._spot = (_SPOT << (changes - 1)) * (_RARER if excursions else 1) if changes else 0
        self.slowing: tuple[PassTimes, PassTimes] | None = None

    def compare_with(self, seconds: float, when: str) -> None:
        """Let links be measured if the first two windows that follow take much longer than so many seconds.

        Args:
            seconds: seconds of an earlier pass with the same plan.
            when: when that was, for messages.
        """
        self._earlier.append((seconds, when))

    def expect_no_excursions(self) -> None:
        """Let links be measured as often as without excursions, because there are none."""
        self._spot //= _RARER

    def begin_anew(self) -> None:
        """Compare the windows that follow with the next two, because another plan is in use or is timed otherwise."""
        self._usual, self._first, self._strikes = None, [], []

    def record(self, window: PassTimes, passes: int = WINDOW) -> str:
        """Record a window; returns why links should be measured again, empty if they need not.

        Args:
            window: medians of its passes.
            passes: number of passes since the last window, of any plan.
        """
        self._passes += passes
        self.slowing = None
        if (reason := self._compare(window)) or not 0 < self._spot <= self._passes:
            return reason
        self._passes, self._spot = 0, 2 * self._spot
        return "links changed before in this job"

    def _compare(self, window: PassTimes) -> str:
        if self._usual is None:
            self._first.append(window)
            if len(self._first) == _CONFIRMED:
                self._usual = median_times(self._first)
                return self._compare_with_earlier(self._usual)
            return ""
        change = window.period - self._usual.period - (window.compute - self._usual.compute)
        relative = change / self._usual.period
        counts = abs(relative) > CHANGED and abs(change) > LEAST_CHANGE
        self._strikes = [*self._strikes, relative] if counts else []
        if len(self._strikes) >= self._confirmed and abs(sum(self._strikes)) >= _EVIDENCE:
            if relative > 0:
                self.slowing = self._usual, window
            # If the links have changed, a new watch begins. Otherwise this is the new usual time.
            self.begin_anew()
            self._confirmed *= 2
            return f"steps wait {abs(relative):.0%} {'longer' if relative > 0 else 'less'} than before"
        return ""

    def _compare_with_earlier(self, now: PassTimes) -> str:
        earlier, self._earlier = self._earlier, []
        for seconds, when in earlier:
            if now.period - seconds >= max(UNLIKE * seconds, LEAST_CHANGE):
                self.slowing = PassTimes(seconds, 0.0, now.compute), now  # computation of then is not known
                return f"a step takes {now.period:.3g} s, and {seconds:.3g} s {when}"
        return ""


def median_times(times: Sequence[PassTimes]) -> PassTimes:
    """Medians of several passes or windows, in which a single delayed pass does not count."""
    return PassTimes(
        statistics.median(each.whole for each in times),
        statistics.median(each.unusual for each in times),
        statistics.median(each.compute for each in times),
    )
