"""What a trial of a study says: its plan, its steps, how its point came about."""

from __future__ import annotations

import json
import statistics
from contextlib import suppress
from typing import Any, Protocol

from optuna.trial import FrozenTrial, TrialState

from lightning_autosync.errors import PlanError
from lightning_autosync.plan import SyncPlan
from lightning_autosync.plan.space import BUILDER, COMPOSED, Genome, PlanSpace
from lightning_autosync.search.drift import Sight
from lightning_autosync.search.storages import StudyError

ORIGIN, PREDICTED, STEPS, PLAN = "autosync:origin", "autosync:predicted", "autosync:steps", "autosync:plan"
"""User attributes of a trial: how its point came about, seconds of a step as estimated when it was chosen, seconds of
each measured step (a list a rank), and the fingerprint of its plan."""
REFINED = "autosync:refined"
"""Another one: the document of a plan that refines the trial's point and is tried in its place, as JSON text."""
ERROR, INTERRUPTED = "autosync:error", "autosync:interrupted"
"""More of them: why a trial failed or was stopped early, and whether that was none of its plan's doing, as a Ctrl-C."""
BROKEN_OFF = "interrupted"
"""Why a trial failed that a Ctrl-C ended."""
RUN, BATCH, REFERENCE, PRICE = "autosync:run", "autosync:batch", "autosync:reference", "autosync:price"
"""Of a run beside others in a study: the name of its directory, the number of the first trial of a batch, seconds of a
step of the study's reference plan, measured beside that batch, and those of the trial's plan as the replay says."""
BASELINE, BUILT = "baseline", "builder"
"""Origins of points that stand for a builder's plan: of those tried in front, and of what a sampler proposes."""


class Tried(Protocol):
    """A live or a finished trial of Optuna."""

    @property
    def number(self) -> int: ...

    @property
    def params(self) -> dict[str, Any]: ...

    @property
    def user_attrs(self) -> dict[str, Any]: ...


def plan_of(trial: Tried, space: PlanSpace) -> SyncPlan:
    """The plan of a trial: the one that refines its point, if it carries one, else the point's own.

    Raises:
        StudyError: its parameters are not those of the space, or what it carries is no plan.
    """
    try:
        refined = trial.user_attrs.get(REFINED)
        return space.plan(trial.params) if refined is None else refined_plan(refined)
    except PlanError as error:
        raise StudyError(f"trial {trial.number}: {error}") from None


def refined_plan(text: str) -> SyncPlan:
    """The plan that a trial carries as `REFINED`.

    Raises:
        PlanError: it is none.
    """
    try:
        data = json.loads(text)
    except (TypeError, ValueError) as error:
        raise PlanError(f"{REFINED}: not the JSON text of a plan: {error}") from None
    return SyncPlan.from_dict(data, REFINED)


def sight_of(trial: FrozenTrial) -> Sight:
    """What a trial tells of drift."""
    steps = measured_steps(trial) if trial.state.is_finished() else ()
    batch = trial.user_attrs.get(BATCH)
    return Sight(
        run=trial.user_attrs.get(RUN),
        number=trial.number,
        batch=batch if isinstance(batch, int) else None,
        reference=_seconds(trial, REFERENCE),
        seconds=statistics.median(steps) if steps else None,
        price=_seconds(trial, PRICE),
        baseline=trial.user_attrs.get(ORIGIN) in (BASELINE, BUILT),
    )


def _seconds(trial: FrozenTrial, name: str) -> float | None:
    """An attribute that is a time; None if it is none."""
    value = trial.user_attrs.get(name)
    return float(value) if isinstance(value, int | float) and 0 < value < float("inf") else None


def measured_steps(trial: FrozenTrial) -> tuple[float, ...]:
    """Seconds of each measured step of the slowest rank; of a trial without, its value alone; empty if it has none."""
    if by_rank := [steps for steps in trial.user_attrs.get(STEPS, ()) if steps]:
        return tuple(max(by_rank, key=statistics.median))
    value = trial.value if trial.state == TrialState.COMPLETE else None
    if value is None:
        with suppress(ValueError):
            value = trial.intermediate_values[max(trial.intermediate_values)]
    return (float(value),) if value is not None and 0 < value < float("inf") else ()


def seconds_of(trial: FrozenTrial) -> float | None:
    """Seconds of a step of a trial's plan: its value, or, if it was given up, the median of the steps that it made;
    None where it has no time."""
    if trial.state == TrialState.COMPLETE and trial.value is not None:
        seconds = trial.value
    elif trial.state == TrialState.PRUNED and (steps := measured_steps(trial)):
        seconds = statistics.median(steps)
    else:
        return None
    return seconds if 0 < seconds < float("inf") else None


def is_composed(trial: FrozenTrial) -> bool:
    """Whether a trial's parameters tell its plan: it is no builder's, and none that refines the point."""
    return REFINED not in trial.user_attrs and trial.params.get(BUILDER, COMPOSED) == COMPOSED


def was_interrupted(trial: FrozenTrial) -> bool:
    """Whether a trial ended before anything was learned of its plan, so that the plan may be tried again."""
    return trial.state == TrialState.FAIL and bool(trial.user_attrs.get(INTERRUPTED))


def given_point(trial: FrozenTrial) -> Genome:
    """The point that a trial was given, or else the one that it has come to."""
    found: Genome = trial.system_attrs.get("fixed_params", trial.params)
    return found


def kind_of(trial: FrozenTrial) -> str:
    """How a trial's point came about, or the builder that it stands for."""
    origin = str(trial.user_attrs.get(ORIGIN, "drawn"))
    return str(trial.params[BUILDER]) if origin in (BASELINE, BUILT) else origin
