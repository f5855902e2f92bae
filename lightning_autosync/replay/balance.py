"""Shares from measured times: all ranks should need the same time for their parts of a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_APART = 0.25
"""Relative difference of two numbers of samples whose times tell the cost of a sample from that of a batch."""
_EQUAL, _FLAT = 0.1, 0.02
"""Relative difference of two times that are nearly equal, and the part of such a time that counts as that of samples.
"""


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

    Without an earlier one, or if both make no sense together, all time counts as that of samples. If both are nearly
    equal, nearly all counts as that of a batch.
    """
    if before is not None and abs(samples - before[0]) >= _APART * max(samples, before[0]):
        each = (seconds - before[1]) / (samples - before[0])
        if abs(seconds - before[1]) <= _EQUAL * seconds:  # noise decides how many samples such a rank could compute
            each = max(each, _FLAT * seconds / samples)
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
