"""`Examples`: samples as simulators see them."""

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
"""Standard error that a measured time has at least, as a share."""
_USUAL = 4
"""Steps for which it counts what is usual."""
_OF_MEDIAN = 1.2533
"""Standard error of a median over that of a mean (normal values, many of them)."""
_OF_DEVIATION = 1.4826
"""Standard deviation over median absolute deviation (normal values)."""
_CARRIED = 0.14
"""Share of the variance of the reference plan's times, from batch to batch, that the times of the other plans have too.

From ``examples/datasets/emulated`` (10,080 samples, about 9 batches for each workload and cluster): from batch to
batch the error of the replay deviates by 2.2% where the reference does by less than 1%, and by 4.4% where it does by
more than 4%. It follows the logarithm of the reference with a slope of 0.17 only; so times are not divided by that, but
what drifts counts as noise that the samples of a batch share.
"""
_LEAST_BATCHES = 3
"""Batches of a pair from which on their references say how much its times drift."""


@dataclass(frozen=True)
class Examples:
    """Encoded samples.

    Attributes:
        items: what the simulator sees of each plan.
        base: [samples] logarithm of the seconds to which it adds.
        target: [samples] logarithm of the measured seconds.
        noise: [samples] standard error of ``target``, beside others of the same batch.
        pair: [samples] number of the workload and cluster of each.
        batch: [samples] number of what each was measured along with, for one pair and in one go.
        drift: [samples] standard deviation, from batch to batch, of what the samples of a batch have in common in
            ``target``; 0 where that is not known.
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
        """The examples at some places."""
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
        """Examples from samples, what the simulator sees of each, and the logarithm of the seconds to which it adds."""
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
    """[samples] the number of each sample's workload, cluster and environment, from 0 on."""
    keys = Keys()
    return _numbers((*keys.of(sample), sample.environment) for sample in samples)


def number_batches(samples: Iterable[Sample], pair: Integers) -> Integers:
    """[samples] the number of each sample's batch, from 0 on; a sample without a known reference is a batch by itself.

    Args:
        samples: measured plans.
        pair: [samples] see `number_pairs`.
    """
    # No two batches of a pair have a reference in common, which is a time with all its digits.
    return _numbers(
        (one, sample.reference, place if sample.reference is None else None)
        for place, (sample, one) in enumerate(zip(samples, pair.tolist(), strict=True))
    )


def _numbers(names: Iterable[Hashable]) -> Integers:
    """[names] equal names get the same number, from 0 on."""
    numbers: dict[Hashable, int] = {}
    return numpy.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=numpy.int64)


def _spread(samples: Sequence[Sample]) -> tuple[Integers, Floats]:
    """[samples] degrees of freedom of the steps, and the variance of their logarithms (0 for a single step)."""
    logs = [numpy.log(sample.steps) for sample in samples]
    free = numpy.array([len(steps) - 1 for steps in logs], dtype=numpy.int64)
    own = numpy.array([steps.var(ddof=1) if len(steps) > 1 else 0.0 for steps in logs], dtype=numpy.float64)
    return free, own


def _usual(free: Integers, own: Floats, pair: Integers) -> Floats:
    """[samples] the usual variance of a step's logarithm for the pair; 0 where all samples have single steps.

    Args:
        free, own: see `_spread`.
        pair: [samples] see `number_pairs`.
    """
    usual = numpy.zeros(len(own))
    for one in numpy.unique(pair):
        members = (pair == one) & (free > 0)
        if members.any():
            # The median, since a few samples whose steps were held up must not count. For so few steps it is below the
            # mean of the variances (chi-squared), so it is divided by their ratio (Wilson and Hilferty's formula).
            ratio = (1 - 2 / (9 * free[members])) ** 3
            usual[pair == one] = numpy.median(own[members] / ratio)
    return usual


def _noise(free: Integers, own: Floats, usual: Floats) -> Floats:
    """[samples] standard errors of the logarithms of the median steps.

    A few steps say little about their own spread, and one says nothing. So each sample's variance is drawn towards the
    usual one of its pair, as if `_USUAL` further steps had shown that.

    Args:
        free, own: see `_spread`.
        usual: see there.
    """
    return _of_median((free * own + _USUAL * usual) / (free + _USUAL), free)


def _of_median(variance: Floats, free: Integers) -> Floats:
    """[samples] standard errors of medians of ``free + 1`` steps whose logarithms have that variance."""
    error: Floats = _OF_MEDIAN * numpy.sqrt(variance / (free + 1))
    return error


def _drift(samples: Sequence[Sample], pair: Integers, batch: Integers, error: Floats) -> Floats:
    """[samples] standard deviations, from batch to batch, of what all logarithms of seconds in a batch share.

    Pairs with fewer than `_LEAST_BATCHES` references have none. In the others a sample without one has drifted, too.

    Args:
        samples: measured plans.
        pair, batch: [samples] see `number_pairs` and `number_batches`.
        error: [samples] standard error that is usual for the logarithm of a median of as many steps.
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
            # The reference is a median of as few steps as the samples', which alone makes it spread.
            variance = spread**2 - numpy.median(error[members]) ** 2
            drift[members] = numpy.sqrt(_CARRIED * max(0.0, variance))
    return drift


class Keys:
    """Fingerprints of workloads and clusters; each is computed once, however many samples share the document."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, int], tuple[Sample, tuple[str, str]]] = {}

    def of(self, sample: Sample) -> tuple[str, str]:
        """Fingerprints of the workload and of the cluster."""
        identity = id(sample.workload), id(sample.cluster)
        if identity not in self._of:
            # The sample is kept, so that no other document can come to have the same identity.
            self._of[identity] = sample, (sample.workload.fingerprint, sample.cluster.fingerprint)
        return self._of[identity][1]
