"""Encodes samples once for all kinds of simulators, on several cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy

from lightning_autosync.lab.fitting.spread import spread
from lightning_autosync.learned.context import Contexts
from lightning_autosync.learned.dataset import Sample
from lightning_autosync.learned.ensemble import KINDS
from lightning_autosync.learned.examples import Examples, number_pairs
from lightning_autosync.learned.plan_arrays import plan_arrays
from lightning_autosync.replay import Constants

_CHUNK = 64
"""Samples of a piece of work."""


class _Encoded(NamedTuple):
    """One sample: for each kind what it sees, and the logarithm of the seconds to which it adds."""

    replayed: float
    kinds: dict[str, tuple[Any, float]]


def encode_samples(
    samples: Sequence[Sample],
    constants: Constants,
    kinds: Sequence[str],
    processes: int | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> dict[str, Examples]:
    """What each kind sees of samples; for ``replay``, whose items are empty, ``base`` is what it says.

    Args:
        samples: measured plans.
        constants: costs of the hosts.
        kinds: names of simulators.
        processes: that share the work; None takes one a core.
        progress: told how many more samples are done.
    """
    order = numpy.argsort(number_pairs(samples), kind="stable")
    found: list[Any] = [None] * len(samples)
    chunks = [order[start : start + _CHUNK] for start in range(0, len(order), _CHUNK)]
    work = [[samples[place] for place in chunk] for chunk in chunks]
    for chunk, made in zip(chunks, spread(_Encoder, (constants, tuple(kinds)), work, processes), strict=True):
        for place, one in zip(chunk, made, strict=True):
            found[place] = one
        progress(len(chunk))
    encoded = {}
    for kind in kinds:
        if kind == "replay":
            encoded[kind] = Examples.of(samples, [None] * len(samples), [one.replayed for one in found])
        else:
            columns = zip(*(one.kinds[kind] for one in found), strict=True)
            encoded[kind] = Examples.of(samples, *map(list, columns))
    return encoded


class _Encoder:
    """Keeps the contexts of what it encoded before."""

    def __init__(self, constants: Constants, kinds: Sequence[str]) -> None:
        self._contexts = Contexts(constants)
        self._kinds = {name: KINDS[name] for name in kinds if name in KINDS}

    def __call__(self, samples: Sequence[Sample]) -> list[_Encoded]:
        return [self._encode(sample) for sample in samples]

    def _encode(self, sample: Sample) -> _Encoded:
        found = plan_arrays(self._contexts.of(sample.workload, sample.cluster), sample.plan)
        items = {name: (kind.encode(found), kind.base(found)) for name, kind in self._kinds.items()}
        return _Encoded(float(numpy.log(found.prediction.step_time)), items)
