"""Fits one simulator to the samples that are not held out, judges it on the others, and writes its card."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy
from numpy.typing import NDArray

from lightning_autosync.documents import digest
from lightning_autosync.lab.fitting.comparison import SimulatorAccuracy
from lightning_autosync.lab.fitting.splits import FitSettings, cluster, family, for_all
from lightning_autosync.learned import LearnedEstimator, Simulator
from lightning_autosync.learned.card import (
    HeldOutAccuracy,
    Limits,
    PredictionAccuracy,
    SimulatorCard,
    installed_versions,
)
from lightning_autosync.learned.dataset import Sample
from lightning_autosync.learned.dataset.parts import load_manifest
from lightning_autosync.learned.examples import Examples
from lightning_autosync.learned.registry import SimulatorSettings

_log = logging.getLogger(__name__)


def fit_all(settings: FitSettings, samples: Sequence[Sample], examples: Examples, simulator: Simulator) -> None:
    """Train a simulator in place on all samples; each network holds out some, by which its epoch is chosen.

    Args:
        settings: settings of the fit.
        samples: measured plans.
        examples: the same, encoded for the simulator.
        simulator: simulator to train; the replay does not learn.
    """
    if isinstance(simulator, LearnedEstimator):
        _log.info("training %d networks on %d samples", simulator.members, len(samples))
        simulator.fit_encoded(examples, for_all(samples, settings.seed, simulator.members).held_out)


class HeldOutSamples:
    """Samples from which a simulator does not learn, to judge it.

    Args:
        examples: the samples, encoded for the simulator.
        replayed: the same, encoded for ``replay``.

    Raises:
        DocumentError: all measured times are equal within noise, so that they can judge no simulator.
    """

    def __init__(self, examples: Examples, replayed: Examples) -> None:
        self._examples = examples
        self._replay = _accuracy(replayed, numpy.exp(replayed.base))

    def judge(self, simulator: Simulator) -> HeldOutAccuracy:
        """The accuracy of a fitted simulator, and of the replay alone."""
        own = self._replay
        if isinstance(simulator, LearnedEstimator):
            seconds = simulator.estimate_encoded(self._examples.items, self._examples.base).seconds
            own = _accuracy(self._examples, seconds)
        pairs = len(numpy.unique(self._examples.pair))
        return HeldOutAccuracy(pairs=pairs, plans=len(self._examples), simulator=own, replay=self._replay)


def _accuracy(examples: Examples, seconds: NDArray[numpy.float64]) -> PredictionAccuracy:
    found = SimulatorAccuracy.of(examples, seconds, advice="hold out other models or clusters")
    lost = list(regrets(examples, seconds).values())
    return PredictionAccuracy(
        ranking=found.ranking,
        tau=found.tau,
        median_error=found.median,
        regret=float(numpy.mean(lost)),
        largest_regret=max(lost),
    )


def regrets(examples: Examples, seconds: NDArray[numpy.float64]) -> dict[int, float]:
    """By pair of workload and cluster, how much slower than the best plan the one is that is predicted to be fastest.

    Args:
        examples: measured plans.
        seconds: [samples] predicted seconds.
    """
    found = {}
    for pair in numpy.unique(examples.pair):
        members = numpy.flatnonzero(examples.pair == pair)
        chosen = members[numpy.argmin(seconds[members])]
        found[int(pair)] = float(numpy.exp(examples.target[chosen] - examples.target[members].min()) - 1)
    return found


def card_of(
    settings: FitSettings, kept: Sequence[Sample], apart: Sequence[Sample], accuracy: HeldOutAccuracy | None
) -> SimulatorCard:
    """The card of a simulator that was fitted to the samples ``kept`` and judged on the samples ``apart``."""
    parts = [part.sha256 for folder in settings.dataset for part in load_manifest(Path(folder)).parts]
    return SimulatorCard(
        command=command_of(settings),
        dataset=digest(parts),
        samples=len(kept),
        clusters=tuple(sorted({cluster(sample) for sample in kept})),
        models=tuple(sorted({family(sample) for sample in kept})),
        limits=Limits.of([*kept, *apart]),
        held_out=settings.held_out,
        accuracy=accuracy,
        environments=tuple(sorted({sample.environment for sample in kept if sample.environment})),
        versions=installed_versions(),
        fitted_on=datetime.date.today().isoformat(),
    )


def command_of(settings: FitSettings) -> str:
    """The command that fits the same simulator, without the comparison of simulators."""
    words = ["autosync fit", f"dataset={_listed(settings.dataset)}", f"simulator={settings.simulator.kind}"]
    shipped = SimulatorSettings.shipped(settings.simulator.kind).model_dump(mode="json")
    for name, value in settings.simulator.model_dump(mode="json").items():
        if shipped[name] != value:
            words.append(f"simulator.{name}={_listed(value)}")
    if settings.held_out:
        words += [f"held_out.{name}={_listed(value)}" for name, value in settings.held_out]
    for name in ("start", "constants", "cores"):
        if (given := getattr(settings, name)) is not None:
            words.append(f"{name}={given}")
    return " ".join([*words, f"seed={settings.seed}", "compare=[]"])


def _listed(value: object) -> str:
    """A value as the command line takes it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{_listed(one)}" for name, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_listed, value)) + "]"
    return str(value)
