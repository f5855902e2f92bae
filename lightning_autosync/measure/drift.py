"""Drift of the machine: a reference plan, measured again with every batch, tells how fast everything was just then.

One plan can be slow by itself for a while: on emulated clusters the trials beside it share hardly any of its usual
deviations. So it is believed as far as the trials follow it, measured against what a replay says of each. What a
sampler predicts is no measure: it learns from the same times, and comes to expect slow ones.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

THRESHOLD = 0.05
"""Spread of the smoothed reference from which on times are compared relative to it."""
WINDOW = 5
"""Turns of the reference whose running median is taken: a lone slow turn is no drift."""
DOUBT = 0.5
"""Sum of the reference's deviations beside all trials, in logarithms, from which on it is believed, if all follow it:
two trials beside a reference that is a third slower than usual, eleven beside one that is 5% slower."""


class DriftObservation(NamedTuple):
    """What a trial tells of drift, None where unknown.

    Attributes:
        run: that it is of.
        number, batch: its own, and that of the first trial of its batch.
        reference: seconds of the reference beside that batch.
        seconds: of a step of the trial's plan.
        price: the same, as the replay says, which learns from no trial.
        baseline: whether the plan is a builder's.
    """

    run: str | None
    number: int
    batch: int | None
    reference: float | None
    seconds: float | None
    price: float | None
    baseline: bool = False


@dataclass(frozen=True)
class Drift:
    """What the reference's turns say.

    Attributes:
        turns: seconds of a step of the reference by the number of the trial that it was measured with, ascending.
        share: of the reference's deviations, in logarithms, that other plans have too: from 0 to 1.
    """

    turns: Mapping[int, float]
    share: float = 1.0

    @cached_property
    def level(self) -> float | None:
        """Seconds of the reference, over the whole run."""
        return statistics.median(self.turns.values()) if self.turns else None

    @cached_property
    def spread(self) -> float:
        """By how much plans were slower in the slowest stretch than in the fastest."""
        smooth = list(self._smooth.values())
        return self._shared(max(smooth) / min(smooth)) - 1 if smooth else 0.0

    @property
    def seen(self) -> bool:
        """Whether times are compared relative to the reference."""
        return self.spread > THRESHOLD

    def corrected(self, number: int, seconds: float) -> float:
        """The seconds of a trial as they would have been at the reference's `level`; as they are without drift."""
        if not self.seen:
            return seconds
        level = self.level
        assert level is not None
        return seconds * self._shared(level / self._at(number))

    def expected(self, seconds: float) -> float:
        """The other way round: what corrected seconds are at the latest turn of the reference.

        They are no less than that turn by itself says, for whoever is given up as slow should be slow either way.
        """
        if self.level is None:
            return seconds
        latest = max(self.turns)
        alone = self.turns[latest] / self.level
        if not self.seen:
            return seconds * alone if alone > 1 + THRESHOLD else seconds
        return seconds * max(alone, self._shared(self._at(latest) / self.level))

    def bring(self, stretch: Drift, number: int, seconds: float) -> float:
        """Seconds of another stretch of time, during which the same reference was measured, on this one's footing.

        They are corrected within that stretch as `corrected` does it, and brought from its level to this one's where
        the two differ by more than a spread that counts.
        """
        found = stretch.corrected(number, seconds)
        if self.level is None or stretch.level is None:
            return found
        ratio = self._shared(self.level / stretch.level)
        return found * ratio if max(ratio, 1 / ratio) - 1 > THRESHOLD else found

    def to_dict(self) -> dict[str, Any]:
        """All of it, as plain data."""
        return {
            "seen": self.seen,
            "spread": self.spread,
            "threshold": THRESHOLD,
            "share": self.share,
            "ranked_by": "seconds relative to the reference" if self.seen else "seconds as measured",
            "reference_seconds": self.level,
            "reference_by_trial": {str(number): seconds for number, seconds in self.turns.items()},
        }

    def _at(self, number: int) -> float:
        """The smoothed reference at a trial: the last turn up to it, or the first of all."""
        turns = list(self._smooth)
        return self._smooth[turns[max(0, bisect_right(turns, number) - 1)]]

    def _shared(self, ratio: float) -> float:
        """What a ratio of the reference's seconds is for other plans."""
        return float(ratio**self.share)

    @cached_property
    def _smooth(self) -> dict[int, float]:
        numbers = sorted(self.turns)
        return {number: _around([self.turns[n] for n in numbers], place) for place, number in enumerate(numbers)}


def run_with_turns(sights: Sequence[DriftObservation], wanted: str | None) -> str | None:
    """The wanted run, if the reference had a turn in it; else the first in which it had, if there is one."""
    runs = [sight.run for sight in sights if sight.batch is not None and sight.reference is not None]
    return wanted if wanted in runs or not runs else runs[0]


class DriftCorrection:
    """Seconds of trials of several runs on the footing of one, by the reference that all of them measure.

    Args:
        turns: by run the seconds of the reference, as of `Drift`.
        run: on whose footing the seconds are.
        share: as of `Drift`, of all runs.
    """

    def __init__(self, turns: Mapping[str | None, Mapping[int, float]], run: str | None, share: float = 1.0) -> None:
        self._share = share
        self._stretches = {name: Drift(found, share) for name, found in turns.items()}
        self.base = self._stretches.get(run, Drift({}, share))

    @classmethod
    def of(
        cls, sights: Iterable[DriftObservation], run: str | None, now: Mapping[int, float] | None = None
    ) -> DriftCorrection:
        """What trials tell.

        Args:
            sights: the trials.
            run: on whose footing the seconds are.
            now: further turns of that run, as of a batch none of whose trials has ended.
        """
        seen, turns = list(sights), {run: dict[int, float]()}
        for sight in seen:
            if sight.batch is not None and sight.reference is not None:
                turns.setdefault(sight.run, {})[sight.batch] = sight.reference
        turns[run] |= now or {}
        return cls(turns, run, _share(seen))

    def bring(self, run: str | None, number: int, seconds: float) -> float:
        """The seconds that a trial of some run would have taken in the one; as they are where it has no reference."""
        return self.base.bring(self._stretches.get(run, Drift({}, self._share)), number, seconds)


def _share(sights: Sequence[DriftObservation]) -> float:
    """How much of the reference's deviations trials share; all of them where no trial has a price.

    The slope of seconds over the price against the reference, both as logarithms off their medians, by least absolute
    deviations, so that plans which are priced badly count for little. `DOUBT` speaks for no slope. Builders' plans,
    which come first and whose prices are off by something else, have medians of their own.
    """
    kinds: dict[bool, list[tuple[float, float]]] = {}
    for sight in sights:
        if sight.seconds and sight.price and sight.reference:
            pair = math.log(sight.reference), math.log(sight.seconds / sight.price)
            kinds.setdefault(sight.baseline, []).append(pair)
    if not kinds:
        return 1.0
    offs = [off for pairs in kinds.values() for off in _off_medians(pairs)]
    slopes = [(slower / beside, abs(beside)) for beside, slower in offs if beside]
    return min(1.0, max(0.0, _weighted_median([(0.0, DOUBT), *slopes])))


def _off_medians(pairs: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    middle = [statistics.median(values) for values in zip(*pairs, strict=True)]
    return ((one - middle[0], other - middle[1]) for one, other in pairs)


def _weighted_median(weighted: Iterable[tuple[float, float]]) -> float:
    """The value at which half of the weight is reached; pairs are of a value and its weight."""
    ordered = sorted(weighted)
    half, reached = sum(weight for _, weight in ordered) / 2, 0.0
    for value, weight in ordered:
        reached += weight
        if reached >= half:
            return value
    raise ValueError("no values")


def _around(values: Sequence[float], place: int) -> float:
    """The median of the window around a place, shorter at the ends."""
    half = WINDOW // 2
    return statistics.median(values[max(0, place - half) : place + half + 1])
