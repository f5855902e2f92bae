"""Shares from measured times: all ranks should need the same time for their parts of a batch."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

AT_ONCE = 1.25
"""Shares change after one window of times, if the slowest rank would then be so many times as fast."""
WORTHWHILE = 1.05
"""The same after `_WINDOWS` windows of times."""
_WINDOWS = 3
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


class Balancer:
    """Decides when shares change, and to what.

    All ranks record the same numbers, and so come to the same decisions.

    Attributes:
        lines: the times of each rank, as known now; empty before the first record.
    """

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self._counts: tuple[int, ...] = ()
        self._recent: deque[Sequence[float]] = deque(maxlen=_WINDOWS)

    def record(self, counts: Sequence[int], seconds: Sequence[float], bounds: Sequence[float]) -> list[int] | None:
        """Record what batches took.

        Args:
            counts: samples of each rank in these batches.
            seconds: seconds of each rank for its part, without waiting for others.
            bounds: as for `balance`.

        Returns:
            The new samples of each rank; None if the present ones are good enough.
        """
        if tuple(counts) != self._counts:
            self._begin(tuple(counts), seconds)
        self._recent.append(seconds)
        self.lines = self._through(seconds)
        best = self._better(bounds, AT_ONCE)
        if best is None and len(self._recent) == _WINDOWS:
            self.lines = self._through(self._settled())
            best = self._better(bounds, WORTHWHILE)
        return best

    def _begin(self, counts: tuple[int, ...], seconds: Sequence[float]) -> None:
        """Begin to record other counts: the times with the old ones tell what a sample costs."""
        before: list[tuple[int, float] | None] = [None] * len(counts)
        if self.lines:
            before = [(old, line.seconds(old)) for old, line in zip(self._counts, self.lines, strict=True)]
        self.lines = [fit_line(*each) for each in zip(counts, seconds, before, strict=True)]
        self._counts = counts
        self._recent.clear()

    def _settled(self) -> list[float]:
        return [statistics.median(own) for own in zip(*self._recent, strict=True)]

    def _through(self, seconds: Sequence[float]) -> list[Line]:
        return [line.through(*each) for line, *each in zip(self.lines, self._counts, seconds, strict=True)]

    def _better(self, bounds: Sequence[float], threshold: float) -> list[int] | None:
        """Other counts, if they make the slowest rank faster by ``threshold``, or if memory demands them."""
        best = balance(self.lines, sum(self._counts), bounds)
        if tuple(best) == self._counts:
            return None
        if any(count > bound for count, bound in zip(self._counts, bounds, strict=True)):
            return best
        now, then = (
            max(line.seconds(part) for line, part in zip(self.lines, parts, strict=True))
            for parts in (self._counts, best)
        )
        return best if now > threshold * then else None
