"""Medians and paired ratios over rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy

RESAMPLES = 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A median and its bootstrap interval at the level ``CONFIDENCE``."""

    median: float
    low: float
    high: float


def round_time(steps_by_rank: Sequence[Sequence[float]], mean: bool = False) -> float:
    """Seconds a step in one round: each rank's median step (or mean), of the slowest rank."""
    of_steps = numpy.mean if mean else numpy.median
    return max(float(of_steps(steps)) for steps in steps_by_rank)


def relative_medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """For each contender the median over rounds of its time over the round's median contender."""
    names = list(times)
    by_round = numpy.asarray([times[name] for name in names])
    relative = by_round / numpy.median(by_round, axis=0)
    return dict(zip(names, numpy.median(relative, axis=1).tolist(), strict=True))


def paired_ratio(times: Sequence[float], reference: Sequence[float], seed: int = 0) -> Interval:
    """The median over rounds of ``times / reference``, round by round.

    The interval is the percentile bootstrap's (Efron, 1979): the medians of as many rounds, drawn with
    replacement.

    Raises:
        ValueError: no round, or not equally many.
    """
    if not times or len(times) != len(reference):
        raise ValueError(f"ratios are paired by round: got {len(times)} and {len(reference)} rounds")
    ratios = numpy.asarray(times) / numpy.asarray(reference)
    draws = numpy.random.default_rng(seed).integers(len(ratios), size=(RESAMPLES, len(ratios)))
    medians = numpy.median(ratios[draws], axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = numpy.quantile(medians, [tail, 1 - tail])
    return Interval(float(numpy.median(ratios)), float(low), float(high))
