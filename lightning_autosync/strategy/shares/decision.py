"""When shares change: for a gain beyond noise. A change after which steps are no faster is taken back."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_autosync.replay.balance import Line, balance, fit_line
from lightning_autosync.strategy.shares.cuts import divide

_WINDOWS = ((3, 3, 1.25), (6, 6, 1.05), (12, 12, 1.05))
"""Passes of two windows, and how many times as fast steps have to become. The first window proposes shares, and the one
after it has to confirm them, so a slow pass or two change nothing."""
_FIRST_WINDOW = (1, 2, 2.0)
"""The same for the first passes: each step with a rank that is much slower costs much."""
FIRST_PASSES = 6
"""Number of passes in which it holds."""
_LEAST, _MOST = 3, 24
"""Number of passes whose median times are lines, and of passes that are kept."""
_SURE = 4.0
"""Number of standard deviations of a window's noise that a gain has to exceed."""
_DIFFERENCES = 8
"""Differences of times from which the noise is known."""
_TOO_NOISY = 0.35
"""Relative standard deviation of a pass above which times tell no speeds: where the scheduler decides, for example."""
_CLEARLY = 1.05
"""Where noise hides speeds, shares become equal again if that would have made three of four passes this many times as
fast."""
_NEVER = 100.0
"""Logarithm of a gain that nothing reaches."""
_TRIAL, _FASTER = 6, 0.99
"""After so many passes, steps have to take at most this part of the time before a change."""
_HARMFUL = 1.1
"""A change is taken back after half of them, if steps take so many times as long."""


@dataclass(frozen=True)
class Pass:
    """A synchronized pass.

    Attributes:
        busy: seconds of each rank for its part of the batch, without waiting for others.
        step: seconds from the beginning of the batch to the end of the pass, with waiting for other ranks; not a
            number if they tell nothing of shares, because plans are tried.
    """

    busy: Sequence[float]
    step: float


class Noise:
    """How much the time of a rank varies from pass to pass, also before the last change of shares."""

    def __init__(self) -> None:
        self._steps: list[deque[float]] = []

    def record(self, before: Pass, now: Pass) -> None:
        """Record two passes in a row, with the same numbers of samples."""
        self._steps = self._steps or [deque(maxlen=_MOST) for _ in now.busy]
        for steps, one, other in zip(self._steps, before.busy, now.busy, strict=True):
            steps.append(math.log(other / one))

    def deviation(self) -> float:
        """The relative standard deviation of a pass, of the noisiest rank; infinite as long as it is not known.

        It is that of a normal distribution with this mean difference. As long as ranks have few differences, all count
        as those of one rank, and outliers count in full: two slow passes of a rank are no reason to change shares then.
        """
        pooled = [step for steps in self._steps for step in steps]
        if len(pooled) < _DIFFERENCES:
            return math.inf
        if min(map(len, self._steps)) < _DIFFERENCES:
            return math.sqrt(statistics.fmean(step * step for step in pooled) / 2.0)
        return max(statistics.fmean(map(abs, steps)) for steps in self._steps) * math.sqrt(math.pi) / 2.0


@dataclass(frozen=True)
class _Trial:
    """A change of shares that has not proved itself: the samples of each rank before, and seconds of a step then."""

    counts: tuple[int, ...]
    step: float


class Balancer:
    """Decides when shares change, and to what.

    All ranks record the same numbers, and so come to the same decisions.

    Attributes:
        lines: the times of each rank, as known now; empty before the first record.
        taken_back: number of changes that were taken back in a row. After each, a gain has to be twice as large, on a
            logarithmic scale, and twice as far beyond noise.
    """

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.taken_back = 0
        self._counts: tuple[int, ...] = ()
        self._points: list[tuple[int, float]] = []
        self._recent: deque[Pass] = deque(maxlen=_MOST)
        self._noise = Noise()
        self._trial: _Trial | None = None
        self._begins = True

    @property
    def on_trial(self) -> bool:
        """Whether the last change has not proved itself yet."""
        return self._trial is not None

    @property
    def is_calm(self) -> bool:
        """Whether many passes have not changed shares."""
        return self._trial is None and len(self._recent) == _MOST

    @property
    def why_kept(self) -> str:
        """Why the present shares are kept, in words; empty as long as too few passes are known."""
        noise = self._noise.deviation()
        if math.isinf(noise) or len(self._recent) < FIRST_PASSES:
            return ""
        varies = f"the time of a rank varies by {noise:.0%} from step to step"
        if noise > _TOO_NOISY:
            return f"{varies}, too much to tell its speed"
        return f"ranks do not differ enough in speed for clearly faster steps ({varies})"

    def forget(self) -> None:
        """Forget past passes, because steps from now on take other times; their noise is kept."""
        self._recent.clear()
        self._begins = False

    def record(self, counts: Sequence[int], passes: Sequence[Pass], bounds: Sequence[float]) -> list[int] | None:
        """Record passes that followed each other.

        Args:
            counts: samples of each rank in their batches.
            passes: at least one pass.
            bounds: as for `balance`.

        Returns:
            The new samples of each rank; None if the present ones are good enough.
        """
        if tuple(counts) != self._counts:
            self._begin(tuple(counts))
        for each in passes:
            if self._recent:
                self._noise.record(self._recent[-1], each)
            self._recent.append(each)
        newest = list(self._recent)[-_LEAST:]
        self.lines = self._lines_of(newest)
        if self._points and len(newest) == _LEAST:
            measured = zip(self._counts, self.lines, self._points, strict=True)
            self.lines = [fit_line(count, line.seconds(count), before) for count, line, before in measured]
            self._points = []
        beyond = any(count > bound for count, bound in zip(self._counts, bounds, strict=True))
        if beyond and sum(bounds) >= sum(counts):
            self._trial, best = None, balance(self.lines, sum(counts), bounds)
            return None if best == list(counts) else best
        return self._judge(self._trial) if self._trial is not None else self._improve(bounds)

    def _begin(self, counts: tuple[int, ...]) -> None:
        """Begin to record other counts: the times with the old ones tell what a sample costs."""
        if self.lines:
            self._points = [(old, line.seconds(old)) for old, line in zip(self._counts, self.lines, strict=True)]
        self._begins = not self.lines
        self._counts = counts
        self._recent.clear()

    def _lines_of(self, passes: Sequence[Pass]) -> list[Line]:
        """The lines of ranks that need the median times of some passes; slower ranks are slower in all they do."""
        seconds = [statistics.median(own) for own in zip(*(each.busy for each in passes), strict=True)]
        if not self.lines:
            return [fit_line(count, own, None) for count, own in zip(self._counts, seconds, strict=True)]
        measured = zip(self.lines, self._counts, seconds, strict=True)
        return [line.through(count, own) for line, count, own in measured]

    def _improve(self, bounds: Sequence[float]) -> list[int] | None:
        """Better counts, if two windows agree on them."""
        recent, noise = list(self._recent), self._noise.deviation()
        if noise > _TOO_NOISY:
            return self._equal_again(recent, bounds)
        early = self._begins and len(recent) < FIRST_PASSES
        for proposing, confirming, least in (_FIRST_WINDOW, *_WINDOWS) if early else _WINDOWS:
            if len(recent) < proposing + confirming:
                break
            both, second = recent[-proposing - confirming :], recent[-confirming:]
            lines = self._lines_of(both[:proposing])
            sure = max(math.log(least), _SURE * noise / math.sqrt(proposing))
            needed = math.exp(min(2.0**self.taken_back * sure, _NEVER))
            if self._largest_gain(lines) <= needed:
                continue
            if self._gain(second, balance(lines, sum(self._counts), bounds)) > needed:
                self.lines = self._lines_of(both)
                best = balance(self.lines, sum(self._counts), bounds)
                if best == list(self._counts):
                    return None
                self._trial = _Trial(self._counts, _usual_step(both))
                return best
        return None

    def _equal_again(self, recent: Sequence[Pass], bounds: Sequence[float]) -> list[int] | None:
        """Equal counts, if unequal ones have made most passes slower: ranks that were slow are slow no more."""
        equal = divide(sum(self._counts), (1.0,) * len(self._counts))
        allowed = all(count <= bound for count, bound in zip(equal, bounds, strict=True))
        if equal == list(self._counts) or not allowed or len(recent) < _MOST:
            return None
        return equal if self._gain(recent, equal) > _CLEARLY else None

    def _judge(self, trial: _Trial) -> list[int] | None:
        """The counts before the last change, if it has not made steps faster; a change without known steps is kept."""
        if len(self._recent) < _TRIAL // 2:
            return None
        limit = _HARMFUL if len(self._recent) < _TRIAL else _FASTER
        if _usual_step(self._recent) > limit * trial.step:  # false for steps that are not numbers
            self._trial, self.taken_back = None, self.taken_back + 1
            return list(trial.counts)
        if len(self._recent) >= _TRIAL:
            self._trial, self.taken_back = None, 0
        return None

    def _largest_gain(self, lines: Sequence[Line]) -> float:
        """How many times as fast steps would be if samples could be divided, which no counts exceed."""
        now = max(line.seconds(count) for line, count in zip(lines, self._counts, strict=True))
        samples = sum(self._counts) + sum(line.fixed / line.each for line in lines)
        return now * sum(1.0 / line.each for line in lines) / samples

    def _gain(self, passes: Sequence[Pass], best: Sequence[int]) -> float:
        """How many times as fast steps would have been with other counts: the lower quartile of some passes."""
        ratios = [
            line.seconds(then) / line.seconds(now)
            for line, now, then in zip(self.lines, self._counts, best, strict=True)
        ]
        gains = [
            max(each.busy) / max(own * ratio for own, ratio in zip(each.busy, ratios, strict=True)) for each in passes
        ]
        return sorted(gains)[len(gains) // 4]


def _usual_step(passes: Iterable[Pass]) -> float:
    """The median seconds of a step; not a number if they are not known of any pass."""
    known = [each.step for each in passes if not math.isnan(each.step)]
    return statistics.median(known) if known else math.nan
