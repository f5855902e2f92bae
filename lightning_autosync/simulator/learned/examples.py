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
"""Standard error that a measured time has at least, as a share; a single step tells nothing of its own."""


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
        return cls(
            items,
            numpy.array(base, dtype=numpy.float64),
            numpy.log([sample.seconds for sample in samples]),
            numpy.array([max(_LEAST_NOISE, sample.noise) for sample in samples]),
            number_pairs(samples),
        )


def number_pairs(samples: Iterable[Sample]) -> Integers:
    """[samples] a number for each workload and cluster, from 0 on."""
    keys = Keys()
    numbers: dict[tuple[str, str], int] = {}
    return numpy.array([numbers.setdefault(keys.of(sample), len(numbers)) for sample in samples], dtype=numpy.int64)


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
