"""`Examples`: encoded samples with the noise of their times."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from lightning_autosync.learned.dataset.sample import Sample

Floats = NDArray[numpy.float64]
Integers = NDArray[numpy.int64]

_LEAST_NOISE = 0.005
"""Smallest relative standard error of a measured time."""
_USUAL = 4
"""Number of steps as which the usual variance of a pair counts; see `_noise`."""
_OF_MEDIAN = 1.2533
"""Standard error of a median divided by that of a mean (for many normal values)."""
_OF_DEVIATION = 1.4826
"""Standard deviation divided by the median absolute deviation (for normal values)."""
_CARRIED = 0.14
"""Variance between batches that all plans of a pair share, as a share of the reference plan's variance between batches.

From ``examples/datasets/emulated`` (10,080 samples, about 9 batches for each workload and cluster): between batches the
error of the replay deviates by 2.2% where the reference deviates by less than 1%, and by 4.4% where the reference
deviates by more than 4%. The error follows the logarithm of the reference with a slope of only 0.17. So times are not
divided by the reference; the drift counts as noise that the samples of a batch share.
"""
_LEAST_BATCHES = 3
"""Smallest number of a pair's batches from which the drift is estimated."""


@dataclass(frozen=True)
class Examples:
    """Encoded samples.

    Attributes:
        items: [samples] encoded plans.
        base: [samples] logarithm of the seconds to which the simulator adds.
        target: [samples] logarithm of the measured seconds.
        noise: [samples] standard error of ``target`` relative to others of the same batch.
        pair: [samples] number of the workload, cluster and environment.
        batch: [samples] number of the batch: samples of one pair that were measured in one go.
        drift: [samples] standard deviation, between batches, of the part of ``target`` that a batch has in common; 0 if
            unknown.
    """

    items: Sequence[Any]
    base: Floats
    target: Floats
    noise: Floats
    pair: Integers
    batch: Integers
    drift: Floats

    def __len__(self) -> int:
        return len(self.items)

    def part(self, places: Integers) -> Examples:
        """The examples at some indices."""
        return Examples(
            [self.items[place] for place in places],
            self.base[places],
            self.target[places],
            self.noise[places],
            self.pair[places],
            self.batch[places],
            self.drift[places],
        )

    @classmethod
    def of(cls, samples: Sequence[Sample], items: Sequence[Any], base: Sequence[float]) -> Examples:
        """Examples from samples, their encoded plans, and the logarithms of seconds to which the simulator adds."""
        pair = number_pairs(samples)
        batch = number_batches(samples, pair)
        free, own = _spread(samples)
        usual = _usual(free, own, pair)
        return cls(
            items,
            numpy.array(base, dtype=numpy.float64),
            numpy.log([sample.seconds for sample in samples]),
            numpy.maximum(_LEAST_NOISE, _noise(free, own, usual)),
            pair,
            batch,
            _drift(samples, pair, batch, _of_median(usual, free)),
        )


def number_pairs(samples: Iterable[Sample]) -> Integers:
    """[samples] number of each sample's workload, cluster and environment, from 0 on."""
    keys = Keys()
    return _numbers((*keys.of(sample), sample.environment) for sample in samples)


def number_batches(samples: Iterable[Sample], pair: Integers) -> Integers:
    """[samples] number of each sample's batch, from 0 on; a sample without a known reference is a batch of its own.

    Args:
        samples: measured plans.
        pair: [samples] see `number_pairs`.
    """
    # The reference identifies a batch: it is a measured time in full precision, so two batches never share one.
    return _numbers(
        (one, sample.reference, place if sample.reference is None else None)
        for place, (sample, one) in enumerate(zip(samples, pair.tolist(), strict=True))
    )


def _numbers(names: Iterable[Hashable]) -> Integers:
    """[names] numbers from 0 on, equal for equal names."""
    numbers: dict[Hashable, int] = {}
    return numpy.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=numpy.int64)


def _spread(samples: Sequence[Sample]) -> tuple[Integers, Floats]:
    """[samples] degrees of freedom and variance of the logarithms of a sample's steps; both 0 for a single step."""
    logs = [numpy.log(sample.steps) for sample in samples]
    free = numpy.array([len(steps) - 1 for steps in logs], dtype=numpy.int64)
    own = numpy.array([steps.var(ddof=1) if len(steps) > 1 else 0.0 for steps in logs], dtype=numpy.float64)
    return free, own


def _usual(free: Integers, own: Floats, pair: Integers) -> Floats:
    """[samples] usual variance of a step's logarithm for the sample's pair; 0 if all samples have single steps.

    Args:
        free, own: see `_spread`.
        pair: [samples] see `number_pairs`.
    """
    usual = numpy.zeros(len(own))
    for one in numpy.unique(pair):
        members = (pair == one) & (free > 0)
        if members.any():
            # The median ignores a few samples with delayed steps. With so few steps it is below the mean of the
            # variances, which are chi-squared: divide by the ratio of median to mean (Wilson and Hilferty's formula).
            ratio = (1 - 2 / (9 * free[members])) ** 3
            usual[pair == one] = numpy.median(own[members] / ratio)
    return usual


def _noise(free: Integers, own: Floats, usual: Floats) -> Floats:
    """[samples] standard errors of the logarithms of the median steps.

    A few steps tell little about their own variance, and a single step tells nothing. So each sample's variance shrinks
    towards the usual one of its pair, as if `_USUAL` further steps had that variance.

    Args:
        free, own: see `_spread`.
        usual: see `_usual`.
    """
    return _of_median((free * own + _USUAL * usual) / (free + _USUAL), free)


def _of_median(variance: Floats, free: Integers) -> Floats:
    """[samples] standard errors of medians of ``free + 1`` steps whose logarithms have this variance."""
    error: Floats = _OF_MEDIAN * numpy.sqrt(variance / (free + 1))
    return error


def _drift(samples: Sequence[Sample], pair: Integers, batch: Integers, error: Floats) -> Floats:
    """[samples] standard deviations, between batches, of the part that all logarithms of seconds in a batch share.

    The drift is 0 for pairs with fewer than `_LEAST_BATCHES` references. In other pairs it also applies to samples
    without a reference.

    Args:
        samples: measured plans.
        pair, batch: [samples] see `number_pairs` and `number_batches`.
        error: [samples] usual standard error of the logarithm of a median of as many steps.
    """
    known = numpy.array([sample.reference is not None for sample in samples], dtype=bool)
    logs = numpy.log([1.0 if sample.reference is None else sample.reference for sample in samples])
    drift = numpy.zeros(len(samples))
    for one in numpy.unique(pair):
        members = pair == one
        places = numpy.flatnonzero(members & known)
        first = places[numpy.unique(batch[places], return_index=True)[1]]
        if len(first) >= _LEAST_BATCHES:
            spread = _OF_DEVIATION * numpy.median(abs(logs[first] - numpy.median(logs[first])))
            # The references are medians of as few steps as the samples, so part of their variance is not drift.
            variance = spread**2 - numpy.median(error[members]) ** 2
            drift[members] = numpy.sqrt(_CARRIED * max(0.0, variance))
    return drift


class Keys:
    """A cache of the fingerprints of workloads and clusters, since many samples share the same documents."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, int], tuple[Sample, tuple[str, str]]] = {}

    def of(self, sample: Sample) -> tuple[str, str]:
        """Fingerprints of the workload and of the cluster."""
        identity = id(sample.workload), id(sample.cluster)
        if identity not in self._of:
            # Keep the sample alive: otherwise another document could get the same id.
            self._of[identity] = sample, (sample.workload.fingerprint, sample.cluster.fingerprint)
        return self._of[identity][1]
