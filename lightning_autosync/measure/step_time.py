"""Step times: from the times of ranks to one number, and from rounds to ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy

from lightning_autosync.learned.dataset.sample import step_noise
from lightning_autosync.step_times import job_steps, typical_step

RESAMPLES = 10_000
CONFIDENCE = 0.95
Steps = Sequence[Sequence[float]]
"""Seconds, by rank and step."""


@dataclass(frozen=True)
class Interval:
    """A median and its bootstrap confidence interval at the level ``CONFIDENCE``."""

    median: float
    low: float
    high: float


def step_time(steps: Steps, mean: bool = False) -> float:
    """Seconds of a step of a plan, as by `job_steps` and `typical_step`.

    Args:
        steps: seconds by rank and step, at least one step.
        mean: take the largest mean of a rank instead, for methods whose steps differ by design.
    """
    return max(map(statistics.fmean, steps)) if mean else typical_step(job_steps(steps))


def relative_error(steps: Sequence[float]) -> float:
    """Standard error of the median, relative to the median; infinite with fewer than two steps."""
    return step_noise(steps) if len(steps) > 1 else math.inf


def relative_medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """For each contender, the median over rounds of its time relative to the median of all contenders in the round."""
    names = list(times)
    by_round = numpy.asarray([times[name] for name in names])
    relative = by_round / numpy.median(by_round, axis=0)
    return dict(zip(names, numpy.median(relative, axis=1).tolist(), strict=True))


def paired_ratio(times: Sequence[float], reference: Sequence[float]) -> Interval:
    """The median over rounds of ``times / reference``, paired by round.

    The interval is a percentile bootstrap (Efron, 1979): quantiles of the medians of resampled rounds.

    Raises:
        ValueError: there are no rounds, or the numbers of rounds differ.
    """
    if not times or len(times) != len(reference):
        raise ValueError(f"ratios need equal numbers of rounds, at least one: got {len(times)} and {len(reference)}")
    ratios = numpy.asarray(times) / numpy.asarray(reference)
    draws = numpy.random.default_rng(0).integers(len(ratios), size=(RESAMPLES, len(ratios)))
    medians = numpy.median(ratios[draws], axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = numpy.quantile(medians, [tail, 1 - tail])
    return Interval(float(numpy.median(ratios)), float(low), float(high))
