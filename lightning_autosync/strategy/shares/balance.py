"""Shares from measured times: all ranks should need the same time for their parts of a batch."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

AT_FIRST = 2.0
"""Shares change after the first window, which may be a single pass, if the slowest rank would then be so many times as
fast. Less may be noise: the slowest of eight ranks with an exponential noise of 20 % is 1.4 times as slow as usual."""
AT_ONCE = 1.25
"""Shares change after two windows of times, if the slowest rank would then be so many times as fast."""
WORTHWHILE = 1.05
"""The same after `_LEAST` windows of times or more, as soon as noise does not explain the gain."""
_LEAST = 3
_MOST = 8
"""Number of windows that are kept."""
_SURE = 3.0
"""Number of standard deviations of the noise that a gain has to exceed."""
_APART = 0.25
"""Relative difference of two numbers of samples whose times tell the cost of a sample from that of a batch."""


@dataclass(frozen=True)
class Line:
    """The time of a rank for its part of a batch: ``fixed + each * samples`` seconds.

    Attributes:
        fixed: seconds of a batch, however small; at least 0.
        each: seconds of a sample; above 0.
    """

    fixed: float
    each: float

    def seconds(self, samples: float) -> float:
        return self.fixed + self.each * samples

    def through(self, samples: int, seconds: float) -> Line:
        """The line of a rank that is as many times slower as this measurement says."""
        factor = seconds / self.seconds(samples)
        return Line(self.fixed * factor, self.each * factor)


def fit_line(samples: int, seconds: float, before: tuple[int, float] | None) -> Line:
    """The line through a measurement and an earlier one, with other ``samples``.

    Without an earlier one, or if both make no sense together, all time counts as that of samples.
    """
    if before is not None and abs(samples - before[0]) >= _APART * max(samples, before[0]):
        each = (seconds - before[1]) / (samples - before[0])
        fixed = seconds - each * samples
        if each > 0 and fixed >= 0:
            return Line(fixed, each)
    return Line(0.0, seconds / samples)


def balance(lines: Sequence[Line], total: int, bounds: Sequence[float]) -> list[int]:
    """The samples of each rank, at least one, with which the slowest rank needs the least time.

    Args:
        lines: the times of each rank.
        total: number of samples of all ranks; at least one for each.
        bounds: largest number of samples of each rank, by its memory. They do not count if they sum to less than
            ``total``.
    """
    if sum(bounds) < total:
        bounds = [math.inf] * len(lines)

    def within(seconds: float) -> list[int]:
        """The most samples that each rank computes in so many seconds."""
        return [
            int(max(1, min(bound, total, math.floor((seconds - line.fixed) / line.each + 1e-9))))
            for line, bound in zip(lines, bounds, strict=True)
        ]

    low, high = 0.0, max(line.seconds(total) for line in lines)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(within(middle)) >= total else (middle, high)
    parts = within(high)
    while sum(parts) > total:  # ranks that end at the same time
        last = max((rank for rank, part in enumerate(parts) if part > 1), key=lambda r: lines[r].seconds(parts[r]))
        parts[last] -= 1
    return parts


@dataclass(frozen=True)
class Window:
    """Seconds of each rank for its part of a batch, without waiting for others, over some passes.

    Attributes:
        least: the least. Disturbances only add to times, so a rank whose least is long has become slow.
        usual: the median.
    """

    least: Sequence[float]
    usual: Sequence[float]


class Noise:
    """How much the times of ranks vary from window to window, also before the last change of shares."""

    def __init__(self) -> None:
        self._steps: list[deque[float]] = []

    def record(self, before: Sequence[float], now: Sequence[float]) -> None:
        """Record the seconds of each rank in two windows in a row, with the same numbers of samples."""
        self._steps = self._steps or [deque(maxlen=_MOST) for _ in now]
        for steps, one, other in zip(self._steps, before, now, strict=True):
            steps.append(2.0 * abs(other - one) / (other + one))

    def deviation(self) -> float:
        """The relative standard deviation of a window, of all ranks together or of the noisiest one; 0 at first.

        It is that of a normal distribution with this median of differences, which a few slow windows do not change.
        A single rank counts for itself only after `_LEAST` differences, of which one may be a true change.
        """
        pooled = [step for steps in self._steps for step in steps]
        groups = [pooled, *(steps for steps in self._steps if len(steps) >= _LEAST)]
        return max((1.4826 / math.sqrt(2.0) * statistics.median(group) for group in groups if group), default=0.0)


class Balancer:
    """Decides when shares change, and to what.

    All ranks record the same numbers, and so come to the same decisions.

    Attributes:
        lines: the times of each rank, as known now; empty before the first record.
    """

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self._counts: tuple[int, ...] = ()
        self._recent: deque[Window] = deque(maxlen=_MOST)
        self._noise = Noise()

    def record(self, counts: Sequence[int], window: Window, bounds: Sequence[float]) -> list[int] | None:
        """Record what batches took.

        Args:
            counts: samples of each rank in these batches.
            window: seconds of each rank.
            bounds: as for `balance`.

        Returns:
            The new samples of each rank; None if the present ones are good enough.
        """
        begins = not self.lines
        if tuple(counts) != self._counts:
            self._begin(tuple(counts), window)
        elif self._recent:
            self._noise.record(self._recent[-1].usual, window.usual)
        self._recent.append(window)
        newest = list(self._recent)[-2:]
        best = self._update_lines([min(own) for own in zip(*(each.least for each in newest), strict=True)], bounds)
        beyond = any(count > bound for count, bound in zip(self._counts, bounds, strict=True))
        if beyond and sum(bounds) >= sum(counts):
            return None if best == list(counts) else best
        # Any shares are as good as equal ones in the beginning, so one window may be enough there.
        least = AT_FIRST if begins else AT_ONCE
        if (begins or len(newest) == 2) and self._gain(best) > max(least, 1.0 + _SURE * self._noise.deviation()):
            return best
        if len(self._recent) < _LEAST:
            return None
        usual = [each.usual for each in self._recent]
        best = self._update_lines([statistics.median(own) for own in zip(*usual, strict=True)], bounds)
        error = self._noise.deviation() / math.sqrt(len(usual))
        return best if self._gain(best) > max(WORTHWHILE, 1.0 + _SURE * error) else None

    def _begin(self, counts: tuple[int, ...], window: Window) -> None:
        """Begin to record other counts: the times with the old ones tell what a sample costs."""
        before: list[tuple[int, float] | None] = [None] * len(counts)
        if self.lines:
            before = [(old, line.seconds(old)) for old, line in zip(self._counts, self.lines, strict=True)]
        self.lines = [fit_line(*each) for each in zip(counts, window.least, before, strict=True)]
        self._counts = counts
        self._recent.clear()

    def _update_lines(self, seconds: Sequence[float], bounds: Sequence[float]) -> list[int]:
        """The best counts if ranks need so many ``seconds`` for the present ones, by which it corrects `lines`."""
        measured = zip(self.lines, self._counts, seconds, strict=True)
        self.lines = [line.through(count, own) for line, count, own in measured]
        return balance(self.lines, sum(self._counts), bounds)

    def _gain(self, best: Sequence[int]) -> float:
        """How many times as fast the slowest rank would be with other counts."""
        now, then = (
            max(line.seconds(part) for line, part in zip(self.lines, parts, strict=True))
            for parts in (self._counts, best)
        )
        return now / then
