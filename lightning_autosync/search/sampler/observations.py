"""The trials of a study as observations: measured points, and points that are being measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from optuna.trial import FrozenTrial, TrialState

from lightning_autosync.measure.drift import DriftCorrection, run_with_turns
from lightning_autosync.plan.space import PlanSpace, Value
from lightning_autosync.search.population import Choice, Point
from lightning_autosync.search.trial_attributes import (
    REFINED,
    RUN,
    attribute,
    drift_observation,
    measured_steps,
    seconds_of,
    was_interrupted,
)

CHOICE = "autosync:choice"
"""System attribute of a trial: the point chosen for it. Other processes can read it before the parameters are set."""
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass
class Observations:
    """The trials of a study as points of its space.

    Attributes:
        measured: trials with a time, complete or pruned: number, choice, and the logarithm of the seconds.
        steps: by number of these trials, seconds of each step; for a trial without steps, only its time.
        pending: choices that are being measured now.
        failed: choices of failed trials, without interrupted trials, which may be measured again.
        choosing: numbers of running trials whose choice is unknown yet.
        correction: drift correction that was applied to the seconds.
    """

    measured: list[tuple[int, Choice, float]] = field(default_factory=list)
    steps: dict[int, tuple[float, ...]] = field(default_factory=dict)
    pending: list[Choice] = field(default_factory=list)
    failed: list[Choice] = field(default_factory=list)
    choosing: list[int] = field(default_factory=list)
    correction: DriftCorrection = field(default_factory=lambda: DriftCorrection({}, None))

    @classmethod
    def of(cls, trials: Sequence[FrozenTrial], space: PlanSpace, own: int) -> Observations:
        """The observations from all trials except number ``own``. Trials with other parameters are skipped.

        If runs measure a reference, seconds are corrected to the speed of the run of trial ``own``.
        """
        found = cls(correction=_correction(trials, own))
        for trial in trials:
            if trial.number == own:
                continue
            point = point_of(trial, space)
            choice = None if point is None else Choice(point, attribute(trial, REFINED))
            if trial.state in (TrialState.RUNNING, TrialState.WAITING):
                if choice is not None:
                    found.pending.append(choice)
                elif trial.state == TrialState.RUNNING:
                    found.choosing.append(trial.number)
            elif choice is not None and not was_interrupted(trial):
                found._add_finished(trial, choice)
        return found

    def _add_finished(self, trial: FrozenTrial, choice: Choice) -> None:
        if (seconds := seconds_of(trial)) is None:
            self.failed.append(choice)
            return
        factor = self.correction.convert(attribute(trial, RUN), trial.number, 1.0)
        self.measured.append((trial.number, choice, math.log(factor * seconds)))
        self.steps[trial.number] = tuple(factor * step for step in measured_steps(trial))


def _correction(trials: Sequence[FrozenTrial], own: int) -> DriftCorrection:
    run = next((attribute(trial, RUN) for trial in reversed(trials) if trial.number == own), None)
    observed = [drift_observation(trial) for trial in trials]
    return DriftCorrection.of(observed, run_with_turns(observed, run))


def point_of(trial: FrozenTrial, space: PlanSpace) -> Point | None:
    """The point of a trial from its own, its given and its chosen parameters; None if incomplete."""
    fixed = trial.system_attrs.get("fixed_params")
    choice = trial.system_attrs.get(CHOICE)
    chosen = decode(str(choice), space) if choice is not None else {}
    known: Mapping[str, Value] = {**(chosen or {}), **(fixed if isinstance(fixed, dict) else {}), **trial.params}
    if space.has(known):
        whole = space.complete(known)
        return {name: whole[name] for name in space.parameters}
    return None


def encode(point: Mapping[str, Value], space: PlanSpace) -> str:
    """A point as text with one character per parameter, short enough for every storage."""
    return "".join(_DIGITS[domain.index(point[name])] for name, domain in space.parameters.items())


def decode(text: str, space: PlanSpace) -> Point | None:
    """The point of a text from `encode`; None if it does not match the space."""
    domains = space.parameters
    if len(text) != len(domains):
        return None
    indices = [_DIGITS.find(letter) for letter in text]
    if any(not 0 <= index < len(domain) for index, domain in zip(indices, domains.values(), strict=True)):
        return None
    return {name: domain[index] for index, (name, domain) in zip(indices, domains.items(), strict=True)}
