"""`Examples`: samples as simulators see them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from lightning_autosync.simulator.dataset.sample import Sample

Floats = NDArray[numpy.float64]
Integers = NDArray[numpy.int64]

_LEAST_NOISE = 0.005
"""Standard error that a measured time has at least, as a share."""
_USUAL = 4
"""Steps for which it counts what is usual."""
_OF_MEDIAN = 1.2533
"""Standard error of a median over that of a mean (normal values, many of them)."""


@dataclass(frozen=True)
class Examples:
    """Encoded samples.

    Attributes:
        items: what the simulator sees of each plan.
        base: [samples] logarithm of the seconds to which it adds.
        target: [samples] logarithm of the measured seconds.
        noise: [samples] standard error of ``target``.
        pair: [samples] number of the workload and cluster of each.
    """

    items: Sequence[Any]
    base: Floats
    target: Floats
    noise: Floats
    pair: Integers

    def __len__(self) -> int:
        return len(self.items)

    def part(self, places: Integers) -> Examples:
        """Some of them."""
        items = [self.items[place] for place in places]
        return Examples(items, self.base[places], self.target[places], self.noise[places], self.pair[places])

    @classmethod
    def of(cls, samples: Sequence[Sample], items: Sequence[Any], base: Sequence[float]) -> Examples:
        """Samples with what was made of each."""
        pair = number_pairs(samples)
        return cls(
            items,
            numpy.array(base, dtype=numpy.float64),
            numpy.log([sample.seconds for sample in samples]),
            numpy.maximum(_LEAST_NOISE, _noise(samples, pair)),
            pair,
        )


def number_pairs(samples: Iterable[Sample]) -> Integers:
    """[samples] a number for each workload, cluster and environment, from 0 on."""
    keys = Keys()
    numbers: dict[tuple[str | None, ...], int] = {}
    names = ((*keys.of(sample), sample.environment) for sample in samples)
    return numpy.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=numpy.int64)


def _noise(samples: Sequence[Sample], pair: Integers) -> Floats:
    """[samples] standard errors of the logarithms of the median steps.

    A few steps tell little of their own spread, and one tells nothing. So each sample's variance is drawn towards what
    is usual for its pair, as if `_USUAL` further steps had shown that.
    """
    logs = [numpy.log(sample.steps) for sample in samples]
    free = numpy.array([len(steps) - 1 for steps in logs])
    own = numpy.array([steps.var(ddof=1) if len(steps) > 1 else 0.0 for steps in logs])
    usual = numpy.zeros(len(samples))
    for one in numpy.unique(pair):
        members = (pair == one) & (free > 0)
        if members.any():
            # Few samples with steps that were held up are no usual ones. Half of all variances are below the median,
            # which for so few steps is below their mean (chi-squared, by Wilson and Hilferty's formula).
            ratio = (1 - 2 / (9 * free[members])) ** 3
            usual[pair == one] = numpy.median(own[members] / ratio)
    variance = (free * own + _USUAL * usual) / (free + _USUAL)
    noise: Floats = _OF_MEDIAN * numpy.sqrt(variance / (free + 1))
    return noise


class Keys:
    """Fingerprints of workloads and clusters, each document's worked out once however many samples share it."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, int], tuple[Sample, tuple[str, str]]] = {}

    def of(self, sample: Sample) -> tuple[str, str]:
        """Fingerprints of the workload and of the cluster."""
        identity = id(sample.workload), id(sample.cluster)
        if identity not in self._of:
            # The sample is kept, so that no other document can come to have the same identity.
            self._of[identity] = sample, (sample.workload.fingerprint, sample.cluster.fingerprint)
        return self._of[identity][1]
