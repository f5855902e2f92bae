"""What a study knows so far: which points were measured, which are being measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from optuna.trial import FrozenTrial, TrialState

from lightning_autosync.plan.space import PlanSpace, Value
from lightning_autosync.search.studies import measured_steps, was_interrupted

CHOICE = "autosync:choice"
"""System attribute of a trial: the point that was chosen for it, there before its parameters are."""
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_CHOOSING = timedelta(minutes=1)
"""A worker that has not chosen after this long is taken to be dead."""

Point = dict[str, Value]


@dataclass
class Observations:
    """The trials of a study as points of its space.

    Attributes:
        measured: trials with a time, complete or stopped early: number, point, and the logarithm of the seconds.
        pending: points that are being measured now.
        tried: points of all other trials, which failed by themselves; those that were interrupted may be tried again.
        choosing: numbers of the running trials whose point is not known yet.
    """

    measured: list[tuple[int, Point, float]] = field(default_factory=list)
    pending: list[Point] = field(default_factory=list)
    tried: list[Point] = field(default_factory=list)
    choosing: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, trials: Sequence[FrozenTrial], space: PlanSpace, own: int) -> Observations:
        """Sort trials, but for the one numbered ``own``; trials of other parameters are left out."""
        made = cls()
        now = datetime.now()
        for trial in trials:
            if trial.number == own:
                continue
            point = point_of(trial, space)
            if trial.state in (TrialState.RUNNING, TrialState.WAITING):
                if point is not None:
                    made.pending.append(point)
                elif trial.datetime_start is not None and now - trial.datetime_start < _CHOOSING:
                    made.choosing.append(trial.number)
            elif point is not None and not was_interrupted(trial):
                made._add_finished(trial, point)
        return made

    def _add_finished(self, trial: FrozenTrial, point: Point) -> None:
        steps = () if trial.state == TrialState.FAIL else measured_steps(trial)
        if trial.state == TrialState.COMPLETE and trial.value is not None:
            seconds = trial.value
        else:
            seconds = statistics.median(steps) if steps else math.nan
        if 0 < seconds < math.inf:
            self.measured.append((trial.number, point, math.log(seconds)))
        else:
            self.tried.append(point)


def point_of(trial: FrozenTrial, space: PlanSpace) -> Point | None:
    """The point of a trial: its parameters, what it was given, or what was chosen for it; None if it is unknown."""
    fixed = trial.system_attrs.get("fixed_params", {})
    choice = trial.system_attrs.get(CHOICE)
    chosen = decode(str(choice), space) if choice is not None else {}
    known: Mapping[str, Value] = {**(chosen or {}), **fixed, **trial.params}
    if all(known.get(name) in domain for name, domain in space.parameters.items()):
        return {name: known[name] for name in space.parameters}
    return None


def encode(point: Mapping[str, Value], space: PlanSpace) -> str:
    """A point as one character a parameter: short enough for every storage."""
    return "".join(_DIGITS[domain.index(point[name])] for name, domain in space.parameters.items())


def decode(text: str, space: PlanSpace) -> Point | None:
    """The point that `encode` made a text of; None if it is of another space."""
    domains = space.parameters
    if len(text) != len(domains):
        return None
    indices = [_DIGITS.find(letter) for letter in text]
    if any(not 0 <= index < len(domain) for index, domain in zip(indices, domains.values(), strict=True)):
        return None
    return {name: domain[index] for index, (name, domain) in zip(indices, domains.items(), strict=True)}
