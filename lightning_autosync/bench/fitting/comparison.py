"""Trains every simulator on every division of the samples, and tests it on what it did not see."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from lightning_autosync.bench.fitting.accuracy import Accuracy, summary
from lightning_autosync.bench.fitting.settings import Settings, SimulatorSettings
from lightning_autosync.bench.fitting.splits import Split, divide
from lightning_autosync.simulator import Constants
from lightning_autosync.simulator.dataset import Sample
from lightning_autosync.simulator.learned import LearnedEstimator
from lightning_autosync.simulator.learned.examples import Examples


@dataclass(frozen=True)
class Run:
    """One simulator on one division.

    Attributes:
        split: how samples were divided.
        seed: of the division and of the networks.
        simulator: its kind.
        unseen: clusters and families that only the test part has.
        accuracy: on the test part.
        seconds: of training.
    """

    split: str
    seed: int
    simulator: str
    unseen: tuple[str, ...]
    accuracy: Accuracy
    seconds: float


def compare(
    settings: Settings, samples: Sequence[Sample], encoded: Mapping[str, Examples], constants: Constants
) -> Iterator[Run]:
    """Run after run: all simulators on a division, then the next division."""
    options = {kind: SimulatorSettings.shipped(kind) for kind in settings.compare}
    if settings.simulator.kind in options:
        options[settings.simulator.kind] = settings.simulator
    for seed in range(settings.seed, settings.seed + settings.seeds):
        for how in settings.splits:
            split = divide(samples, how, seed)
            for kind, option in options.items():
                begun = time.perf_counter()
                accuracy = judge(option, encoded[kind], split, constants, seed)
                yield Run(how, seed, kind, split.unseen, accuracy, time.perf_counter() - begun)


def judge(option: SimulatorSettings, examples: Examples, split: Split, constants: Constants, seed: int) -> Accuracy:
    """Train a simulator on one part, its epoch chosen on another, and test it on the third."""
    test = examples.part(split.test)
    simulator = option.build(constants, seed)
    if not isinstance(simulator, LearnedEstimator):
        return Accuracy.of(test, numpy.exp(test.base))
    simulator.fit_encoded(examples.part(split.train), examples.part(split.validation))
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
