"""Simulators that learn: the paper's three, and ours, which corrects the replay with what was measured."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from lightning_autosync.learned.kinds import KINDS
from lightning_autosync.learned.learner import LearnedEstimator
from lightning_autosync.learned.simulator import (
    HEADER,
    Estimate,
    Estimator,
    ReplayEstimator,
    Simulator,
    SimulatorError,
    read_header,
)
from lightning_autosync.learned.training import Training

SIMULATORS: dict[str, Callable[..., Simulator]] = {
    ReplayEstimator.KIND: ReplayEstimator,
    **{name: partial(LearnedEstimator, name) for name in KINDS},
}
"""Simulators by name; all take ``constants``, the learned ones also what `LearnedEstimator` takes."""


def load_simulator(directory: str | os.PathLike[str]) -> Simulator:
    """Read a simulator of any kind.

    Raises:
        SimulatorError: there is none, or it is of another format version, damaged, or of a kind unknown here.
    """
    kind = read_header(directory).kind
    if kind not in SIMULATORS:
        raise SimulatorError(
            f"{os.path.join(directory, HEADER)}: kind: '{kind}' is not known; allowed: {', '.join(SIMULATORS)}"
        )
    return ReplayEstimator.load(directory) if kind == ReplayEstimator.KIND else LearnedEstimator.load(directory)


__all__ = [
    "SIMULATORS",
    "Estimate",
    "Estimator",
    "LearnedEstimator",
    "ReplayEstimator",
    "Simulator",
    "SimulatorError",
    "Training",
    "load_simulator",
]
