"""Encodes samples once for all kinds of simulators, on several cores."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy

from lightning_autosync.simulator import Constants
from lightning_autosync.simulator.dataset import Sample
from lightning_autosync.simulator.learned.examples import Examples, number_pairs
from lightning_autosync.simulator.learned.kinds import KINDS
from lightning_autosync.simulator.learned.scene import Scenes
from lightning_autosync.simulator.learned.traits import traits
from lightning_autosync.workers.cores import usable_cores

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
    for chunk, made in zip(chunks, _run(work, constants, kinds, processes), strict=True):
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


def _run(
    work: Sequence[list[Sample]], constants: Constants, kinds: Sequence[str], processes: int | None
) -> Iterator[list[_Encoded]]:
    count = min(processes or usable_cores(), len(work))
    if count == 1:
        scenes = Scenes(constants)
        for part in work:
            yield _encode(part, scenes, kinds)
        return
    # A fork would copy torch's threads half-way through whatever they do.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context, _prepare, (constants, tuple(kinds))) as pool:
        yield from pool.map(_encode_there, work)


def _encode(samples: Sequence[Sample], scenes: Scenes, kinds: Sequence[str]) -> list[_Encoded]:
    made = []
    for sample in samples:
        found = traits(scenes.of(sample.workload, sample.cluster), sample.plan)
        learned = {name: KINDS[name] for name in kinds if name in KINDS}
        items = {name: (kind.encode(found), kind.base(found)) for name, kind in learned.items()}
        made.append(_Encoded(float(numpy.log(found.prediction.step_time)), items))
    return made


_there: tuple[Scenes, tuple[str, ...]]


def _prepare(constants: Constants, kinds: tuple[str, ...]) -> None:
    """In a worker: what all of its work needs."""
    global _there
    _there = Scenes(constants), kinds


def _encode_there(samples: Sequence[Sample]) -> list[_Encoded]:
    return _encode(samples, *_there)
