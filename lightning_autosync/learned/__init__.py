"""Learned simulators: AutoSync's three, and this package's own, which corrects the replay by measurements."""

from __future__ import annotations

from lightning_autosync.learned.ensemble import LearnedEstimator
from lightning_autosync.learned.registry import SIMULATORS, SimulatorSettings, check_kind, load_simulator
from lightning_autosync.learned.simulator import Estimate, Estimator, ReplayEstimator, Simulator, SimulatorError
from lightning_autosync.learned.training import Training

__all__ = [
    "SIMULATORS",
    "Estimate",
    "Estimator",
    "LearnedEstimator",
    "ReplayEstimator",
    "Simulator",
    "SimulatorError",
    "SimulatorSettings",
    "Training",
    "check_kind",
    "load_simulator",
]
