"""Drift: changes of a machine's speed over time, seen by a reference plan that is measured with every batch.

A single plan can be slow for a while although the machine is not: on emulated clusters, trials share hardly any of the
reference's usual deviations. So the correction uses only the share of these deviations that trials have too. To find
the share, the time of each trial is compared with the replay's prediction. A sampler's prediction would not do, since
the sampler learns from the same times.
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
"""Times are corrected if the smoothed reference varies by more than this share."""
WINDOW = 5
"""Turns in the running median of the reference. A median ignores a single slow turn."""
DOUBT = 0.5
"""Weight of the prior assumption that trials do not follow the reference, as a sum of deviations in logarithms.

Two trials that follow a reference that is a third slower than usual outweigh it, as do eleven trials at 5% slower.
"""


class DriftObservation(NamedTuple):
    """The facts of a trial that matter for drift; fields are None where unknown.

    Attributes:
        batch: number of the first trial in its batch.
        reference: seconds of a step of the reference, measured with that batch.
        seconds: measured seconds of a step of the trial's plan.
        price: predicted seconds of the same step, by the replay.
        baseline: whether a builder made the plan.
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
    """Drift during one run.

    Attributes:
        turns: seconds of a step of the reference by the number of the trial measured with it, ascending.
        share: share of the reference's deviations (in logarithms) that other plans have too, from 0 to 1.
    """

    turns: Mapping[int, float]
    share: float = 1.0

    @cached_property
    def level(self) -> float | None:
        """Median seconds of the reference over the run; None if it was not measured."""
        return statistics.median(self.turns.values()) if self.turns else None

    @cached_property
    def spread(self) -> float:
        """How much slower plans were at the machine's slowest than at its fastest; 0.1 means 10%."""
        smooth = list(self._smooth.values())
        return self._shared(max(smooth) / min(smooth)) - 1 if smooth else 0.0

    @property
    def seen(self) -> bool:
        """Whether times are corrected."""
        return self.spread > THRESHOLD

    def corrected(self, number: int, seconds: float) -> float:
        """The seconds of a trial, converted to the reference's `level`; unchanged without drift."""
        if not self.seen:
            return seconds
        level = self.level
        assert level is not None
        return seconds * self._shared(level / self._at(number))

    def expected(self, seconds: float) -> float:
        """The inverse of `corrected` at the latest turn of the reference.

        The result is at least the value by that turn alone, so that a plan is pruned only if it is slow by both.
        """
        if self.level is None:
            return seconds
        latest = max(self.turns)
        alone = self.turns[latest] / self.level
        if not self.seen:
            return seconds * alone if alone > 1 + THRESHOLD else seconds
        return seconds * max(alone, self._shared(self._at(latest) / self.level))

    def convert(self, other: Drift, number: int, seconds: float) -> float:
        """Seconds measured in another run with the same reference, converted to this run.

        They are first corrected within the other run, then scaled from its level to this run's level if these differ by
        more than `THRESHOLD`.
        """
        found = other.corrected(number, seconds)
        if self.level is None or other.level is None:
            return found
        ratio = self._shared(self.level / other.level)
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
        """The smoothed reference at a trial: at the latest turn up to it, else at the first turn."""
        turns = list(self._smooth)
        return self._smooth[turns[max(0, bisect_right(turns, number) - 1)]]

    def _shared(self, ratio: float) -> float:
        """The ratio of other plans' seconds that corresponds to a ratio of the reference's seconds."""
        return float(ratio**self.share)

    @cached_property
    def _smooth(self) -> dict[int, float]:
        numbers = sorted(self.turns)
        return {number: _around([self.turns[n] for n in numbers], place) for place, number in enumerate(numbers)}


def run_with_turns(observations: Sequence[DriftObservation], wanted: str | None) -> str | None:
    """The wanted run if the reference was measured in it or in no run; else the first run with a reference."""
    runs = [
        observation.run
        for observation in observations
        if observation.batch is not None and observation.reference is not None
    ]
    return wanted if wanted in runs or not runs else runs[0]


class DriftCorrection:
    """Converts seconds of trials in several runs to one run, by the reference that all runs measure.

    Args:
        turns: by run, the seconds of the reference, as in `Drift`.
        run: target run of the conversion.
        share: as in `Drift`, for all runs.
    """

    def __init__(self, turns: Mapping[str | None, Mapping[int, float]], run: str | None, share: float = 1.0) -> None:
        self._share = share
        self._runs = {name: Drift(found, share) for name, found in turns.items()}
        self.base = self._runs.get(run, Drift({}, share))

    @classmethod
    def of(
        cls, observations: Iterable[DriftObservation], run: str | None, now: Mapping[int, float] | None = None
    ) -> DriftCorrection:
        """The correction from observed trials.

        Args:
            run: target run of the conversion.
            now: further turns of that run, such as those of a batch that is being measured.
        """
        seen, turns = list(observations), {run: dict[int, float]()}
        for observation in seen:
            if observation.batch is not None and observation.reference is not None:
                turns.setdefault(observation.run, {})[observation.batch] = observation.reference
        turns[run] |= now or {}
        return cls(turns, run, _share(seen))

    def convert(self, run: str | None, number: int, seconds: float) -> float:
        """Seconds of a trial in ``run``, converted to the target run; unchanged if that run has no reference."""
        return self.base.convert(self._runs.get(run, Drift({}, self._share)), number, seconds)


def _share(observations: Sequence[DriftObservation]) -> float:
    """The share of the reference's deviations that trials have too, from 0 to 1; 1 if no trial has a price.

    It is the slope of a regression by least absolute deviations, which is robust against badly priced plans. The
    variables are logarithms minus their medians: of a trial's seconds over its price, and of the reference. `DOUBT` is
    the weight of slope 0. Builders' plans have their own medians, since their prices are off by another factor.
    """
    kinds: dict[bool, list[tuple[float, float]]] = {}
    for observation in observations:
        if observation.seconds and observation.price and observation.reference:
            pair = math.log(observation.reference), math.log(observation.seconds / observation.price)
            kinds.setdefault(observation.baseline, []).append(pair)
    if not kinds:
        return 1.0
    offs = [off for pairs in kinds.values() for off in _off_medians(pairs)]
    slopes = [(slower / beside, abs(beside)) for beside, slower in offs if beside]
    return min(1.0, max(0.0, _weighted_median([(0.0, DOUBT), *slopes])))


def _off_medians(pairs: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    middle = [statistics.median(values) for values in zip(*pairs, strict=True)]
    return ((one - middle[0], other - middle[1]) for one, other in pairs)


def _weighted_median(weighted: Iterable[tuple[float, float]]) -> float:
    """The value at which half of the total weight is reached, from pairs of value and weight."""
    ordered = sorted(weighted)
    half, reached = sum(weight for _, weight in ordered) / 2, 0.0
    for value, weight in ordered:
        reached += weight
        if reached >= half:
            return value
    raise ValueError("no values")


def _around(values: Sequence[float], place: int) -> float:
    """The median of the window around a place; the window is shorter at the ends."""
    half = WINDOW // 2
    return statistics.median(values[max(0, place - half) : place + half + 1])
