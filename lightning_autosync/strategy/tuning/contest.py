"""The comparison of two plans on the passes of a training job, which both synchronize in turn."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from random import Random

LEAST_GAIN = 0.01
"""Share of a pass that a candidate has to gain to replace the present plan."""
GIVE_UP = 1.5
"""A candidate is given up after two passes that take this multiple of the present plan's median."""
EARLY = 8
"""Passes of each plan after which a clear difference decides."""
CLEARLY_SLOWER, SOON = 1.1, 4
"""A candidate that takes this multiple of the present plan's time may be given up after so many passes of each."""
_CLEAR = 3.0
"""Standard errors of a clear difference."""
_CONSISTENT = 1.4826
"""Standard deviation of a normal distribution, in median absolute deviations."""
_OF_MEDIAN = 1.2533
"""Standard error of the median of normally distributed numbers, in standard errors of their mean."""


def candidates_turn(number: int) -> bool:
    """Whether the candidate synchronizes the pass of this number in a contest.

    Each has two of four passes, in an order that looks random and is the same on all ranks. So a slow drift of the
    machines affects both plans alike, and so does a training loop in which every n-th pass differs.
    """
    turns = [False, False, True, True]
    Random(number // len(turns)).shuffle(turns)
    return turns[number % len(turns)]


class Contest:
    """Decides between the present plan and a candidate, from the times of passes.

    Args:
        most: maximum number of passes of each plan; twice as many if the candidate seems faster by then, and the times
            vary too much to be sure.
        known: seconds of passes of the present plan, made before the contest; used to give up a slow candidate.

    Attributes:
        accepted: whether the candidate is faster; None until that is decided.
    """

    def __init__(self, most: int, known: Sequence[float]) -> None:
        self._most = self._until = most
        self._known = statistics.median(known)
        self._own: list[float] = []
        self._candidate: list[float] = []
        self.accepted: bool | None = None

    def record(self, candidate: bool, seconds: float) -> None:
        """Add the time of a pass; passes after the decision are ignored."""
        if self.accepted is not None:
            return
        (self._candidate if candidate else self._own).append(seconds)
        self.accepted = self._decide()

    @property
    def ratio(self) -> float:
        """Median seconds of the candidate's passes, relative to those of the present plan."""
        return statistics.median(self._candidate) / statistics.median(self._own or [self._known])

    @property
    def passes(self) -> tuple[int, int]:
        """Passes of the present plan and of the candidate."""
        return len(self._own), len(self._candidate)

    @property
    def seconds(self) -> tuple[float, float]:
        """Median seconds of passes of the present plan and of the candidate."""
        return statistics.median(self._own or [self._known]), statistics.median(self._candidate)

    @property
    def lost(self) -> float:
        """Seconds that the candidate's passes took beyond those of the present plan."""
        usual = self.seconds[0]
        return sum(max(0.0, each - usual) for each in self._candidate)

    def _decide(self) -> bool | None:
        own, candidate = len(self._own), len(self._candidate)
        usual = max(self._known, statistics.median(self._own or [0.0]))
        if candidate >= 2 and min(self._candidate) > GIVE_UP * usual:
            return False
        fewer = min(own, candidate)
        if fewer < min(SOON, self._most):
            return None
        ratio = self.ratio
        error = ratio * math.hypot(*map(_relative_error, (self._own, self._candidate)))  # standard error of the ratio
        if ratio > CLEARLY_SLOWER + _CLEAR * error:
            return False
        if fewer < min(EARLY, self._most):
            return None
        if ratio < 1 - LEAST_GAIN - _CLEAR * error:
            return True
        if ratio > 1 - LEAST_GAIN + _CLEAR * error:
            return False
        if fewer < self._until:
            return None
        if ratio < 1 - LEAST_GAIN - error:
            return True
        if ratio >= 1 - LEAST_GAIN or self._until > self._most:
            return False
        # It is looked at once more, and not after each pass: the best of many looks would favour any plan.
        self._until = 2 * self._most
        return None


def _relative_error(seconds: Sequence[float]) -> float:
    """Standard error of the median of ``seconds``, relative to it."""
    median = statistics.median(seconds)
    deviation = _CONSISTENT * statistics.median(abs(each - median) for each in seconds)
    return _OF_MEDIAN * deviation / median / math.sqrt(len(seconds))
