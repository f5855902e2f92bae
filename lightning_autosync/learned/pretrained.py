"""The pretrained simulator, whose weights are part of the package, for jobs like those that it learned from."""

from __future__ import annotations

import logging
from pathlib import Path

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.learned.card import CARD, SimulatorCard
from lightning_autosync.learned.ensemble import LearnedEstimator
from lightning_autosync.learned.simulator import ReplayEstimator
from lightning_autosync.replay.constants import Constants
from lightning_autosync.workload import Workload

PRETRAINED = "pretrained"
"""Name of the simulator in settings."""
DIRECTORY = Path(__file__).parent / "weights"
"""Folder of the weights and their card."""
_log = logging.getLogger(__name__)


def load_pretrained() -> LearnedEstimator:
    """The pretrained simulator.

    Raises:
        SimulatorError: a file is missing or damaged, or plans are encoded in another way than when it was fitted.
    """
    return LearnedEstimator.load(DIRECTORY)


def pretrained_card() -> SimulatorCard:
    """The card of the pretrained simulator.

    Raises:
        SimulatorError: the card is missing or damaged.
    """
    return SimulatorCard.load(DIRECTORY / CARD)


def choose_pretrained(
    workload: Workload, cluster: ClusterSpec, constants: Constants
) -> LearnedEstimator | ReplayEstimator:
    """The pretrained simulator for a job like those that it learned from, else the replay; one log line says which.

    Args:
        workload: variables and times of the job.
        cluster: a cluster whose rates are known.
        constants: costs of the job's hosts.

    Raises:
        SimulatorError: see `load_pretrained`.
    """
    simulator = load_pretrained()
    if why := _difference(simulator.constants, workload, cluster, constants):
        _log.info("the replay predicts times, because the pretrained simulator did not learn from such jobs: %s", why)
        return ReplayEstimator(constants)
    _log.info("the pretrained simulator predicts times: it corrects the replay")
    return simulator


def _difference(known: Constants, workload: Workload, cluster: ClusterSpec, constants: Constants) -> str | None:
    """A difference of a job from those that the pretrained simulator learned from; None if there is none."""
    for field in Constants.model_fields:
        given, learned = getattr(constants, field), getattr(known, field)
        if given != learned:
            return f"the hosts' {field} is {given}, but was {learned} in its dataset"
    return pretrained_card().limits.exceeded(workload, cluster)
