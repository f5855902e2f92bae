"""Trains every simulator on every division of the samples, and tests it on what it did not see."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy

from lightning_autosync.lab.fitting.accuracy import Accuracy, summary
from lightning_autosync.lab.fitting.runs import Run
from lightning_autosync.lab.fitting.settings import Settings
from lightning_autosync.lab.fitting.splits import Split, divide
from lightning_autosync.lab.fitting.spread import spread
from lightning_autosync.learned import LearnedEstimator, Simulator
from lightning_autosync.learned.dataset import Sample
from lightning_autosync.learned.examples import Examples
from lightning_autosync.replay import Constants
from lightning_autosync.run_files import RunFile


def compare(
    settings: Settings,
    samples: Sequence[Sample],
    encoded: Mapping[str, Examples],
    constants: Constants,
    file: RunFile[Run],
    start: LearnedEstimator | None = None,
) -> Iterator[Run]:
    """Run after run: all simulators on a division, then the next division; on as many cores as there are.

    Runs that are in the file are read, the others added to it.

    Args:
        settings: of the fit.
        samples: that are divided.
        encoded: what each kind sees of them.
        constants: of the hosts.
        file: of runs of the same samples and simulators.
        start: of its kind, which is trained further in place of an untrained one.

    Raises:
        DocumentError: samples cannot be divided so, or no two measured times of a test part can be told apart.
    """
    numbers = range(settings.seeds) if settings.compare else ()
    divisions = [
        _Division(how, number, divide(samples, how, settings.seed, number))
        for number in numbers
        for how in settings.splits
    ]
    work = [(division, kind) for division in divisions for kind in dict.fromkeys(settings.compare)]
    known = [file.runs.get((division.how, division.number, kind)) for division, kind in work]
    missing = [piece for piece, run in zip(work, known, strict=True) if run is None]
    new = iter(spread(_Judge, (settings, encoded, constants, start), missing, settings.processes))
    for run in known:
        if run is None:
            run = next(new)
            file.append(run)
        yield run


class _Division(NamedTuple):
    how: str
    number: int
    split: Split


class _Judge:
    """Trains and tests one simulator on one division after the other."""

    def __init__(
        self,
        settings: Settings,
        encoded: Mapping[str, Examples],
        constants: Constants,
        start: LearnedEstimator | None,
    ) -> None:
        self._start = start
        self._seed = settings.seed
        self._options = settings.simulators
        self._encoded = encoded
        self._constants = constants

    def __call__(self, piece: tuple[_Division, str]) -> Run:
        (how, number, split), kind = piece
        begun = time.perf_counter()
        accuracy = judge(self._untrained(kind, self._seed + number), self._encoded[kind], split)
        return Run(how, number, kind, split.unseen, accuracy, time.perf_counter() - begun)

    def _untrained(self, kind: str, seed: int) -> Simulator:
        if self._start is not None and kind == self._start.kind.KIND:
            return copy.deepcopy(self._start)
        return self._options[kind].build(self._constants, seed)


def judge(simulator: Simulator, examples: Examples, split: Split) -> Accuracy:
    """Train a simulator on one part and test it on the other."""
    test = examples.part(split.test)
    if not isinstance(simulator, LearnedEstimator):
        return Accuracy.of(test, numpy.exp(test.base))
    simulator.fit_encoded(
        examples.part(split.train), [numpy.searchsorted(split.train, part) for part in split.held_out]
    )
    return Accuracy.of(test, simulator.estimate_encoded(test.items, test.base).seconds)


def tabulate(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """For each split and simulator the summary of its runs."""
    made: dict[str, dict[str, Any]] = {}
    for run in runs:
        row = made.setdefault(run.split, {})
        if run.simulator not in row:
            alike = [one for one in runs if (one.split, one.simulator) == (run.split, run.simulator)]
            row[run.simulator] = summary([one.accuracy for one in alike])
    return made
