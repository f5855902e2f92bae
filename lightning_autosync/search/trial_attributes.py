"""The attributes of a trial: its plan, its steps, the origin of its point."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from optuna.trial import BaseTrial, FrozenTrial, TrialState

from lightning_autosync.documents import LONGEST, Index, PositiveDuration, checked, parse_json
from lightning_autosync.errors import PlanError
from lightning_autosync.measure.drift import DriftObservation
from lightning_autosync.plan import SyncPlan
from lightning_autosync.plan.space import BUILDER, COMPOSED, Genome, PlanSpace
from lightning_autosync.search.population import BUILT
from lightning_autosync.search.storages import StudyError
from lightning_autosync.step_times import job_steps, typical_step

ORIGIN, PREDICTED, STEPS, PLAN = "autosync:origin", "autosync:predicted", "autosync:steps", "autosync:plan"
"""User attributes of a trial: origin of its point, predicted seconds of a step when it was proposed, measured seconds
of each step (a list for each rank), and fingerprint of its plan."""
REFINED = "autosync:refined"
"""The document of a plan that refines the trial's point and is measured instead of it, as JSON text."""
ERROR, INTERRUPTED = "autosync:error", "autosync:interrupted"
"""Why a trial failed or was stopped early; whether the cause was outside its plan, such as a Ctrl-C."""
CTRL_C = "interrupted"
"""The `ERROR` of a trial that a Ctrl-C ended."""
RUN, BATCH, REFERENCE, PRICE = "autosync:run", "autosync:batch", "autosync:reference", "autosync:price"
"""The run (name of its directory), the number of the batch's first trial, seconds of a step of the study's reference
plan measured with that batch, and seconds of the trial's plan predicted by the replay."""
SECONDS, ELAPSED, OWNER = "autosync:seconds", "autosync:elapsed", "autosync:owner"
"""Median seconds of a step, total seconds of the trial, and the process that owns it."""
BASELINE = "baseline"
"""Origin of points that represent a builder's plan and were enqueued first; a sampler's have the origin `BUILT`."""
_TYPES: dict[str, Any] = {
    **dict.fromkeys((ORIGIN, PLAN, REFINED, ERROR, RUN), str),
    **dict.fromkeys((PREDICTED, REFERENCE, PRICE), PositiveDuration),
    STEPS: list[list[PositiveDuration]],
    INTERRUPTED: bool,
    BATCH: Index,
}


def attribute(trial: BaseTrial, name: str) -> Any:
    """One of the attributes above except `SECONDS`, `ELAPSED` and `OWNER`; None if the trial does not have it.

    Raises:
        StudyError: the attribute has a wrong type.
    """
    value = trial.user_attrs.get(name)
    return None if value is None else checked(_TYPES[name], value, f"trial {trial.number}: {name}", StudyError)


def plan_of(trial: BaseTrial, space: PlanSpace) -> SyncPlan:
    """The plan of a trial: its `REFINED` plan if it has one, else the plan of its point.

    Raises:
        StudyError: its parameters do not match the space, or its `REFINED` plan cannot be read.
    """
    try:
        refined = trial.user_attrs.get(REFINED)
        return space.plan(trial.params) if refined is None else refined_plan(refined)
    except PlanError as error:
        raise StudyError(f"trial {trial.number}: {error}") from None


def refined_plan(text: str) -> SyncPlan:
    """The plan from a `REFINED` attribute.

    Raises:
        PlanError: the text is not a plan.
    """
    return SyncPlan.from_dict(parse_json(text, REFINED, PlanError), REFINED)


def drift_observation(trial: FrozenTrial) -> DriftObservation:
    """The facts of a trial that matter for drift."""
    steps = measured_steps(trial) if trial.state.is_finished() else ()
    return DriftObservation(
        run=attribute(trial, RUN),
        number=trial.number,
        batch=attribute(trial, BATCH),
        reference=attribute(trial, REFERENCE),
        seconds=typical_step(steps) if steps else None,
        price=attribute(trial, PRICE),
        baseline=trial.user_attrs.get(ORIGIN) in (BASELINE, BUILT),
    )


def step_time(value: Any) -> float | None:
    """A value from a study if it is valid as seconds of a step; else None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value <= LONGEST else None


def _value(trial: FrozenTrial) -> float | None:
    """The value of a trial; None if it has none."""
    values = trial.values or ()
    if len(values) > 1:
        raise StudyError(f"trial {trial.number}: it has {len(values)} values; allowed: one, the seconds of a step")
    return values[0] if values else None


def measured_steps(trial: FrozenTrial) -> tuple[float, ...]:
    """Seconds of each measured step, the mean of ranks; without steps only the trial's value; else empty."""
    if by_rank := [steps for steps in attribute(trial, STEPS) or () if steps]:
        return tuple(job_steps(by_rank))
    value = _value(trial) if trial.state == TrialState.COMPLETE else None
    if value is None:
        with suppress(ValueError):
            value = trial.intermediate_values[max(trial.intermediate_values)]
    seconds = step_time(value)
    return () if seconds is None else (seconds,)


def seconds_of(trial: FrozenTrial) -> float | None:
    """Seconds of a step of a trial's plan: its value, or the median step of a pruned trial; None if unknown."""
    if trial.state == TrialState.COMPLETE and (value := _value(trial)) is not None:
        return step_time(value)
    if trial.state == TrialState.PRUNED and (steps := measured_steps(trial)):
        return typical_step(steps)
    return None


def is_composed(trial: FrozenTrial) -> bool:
    """Whether a trial's composed parameters determine its plan: it is neither a builder's nor a refined plan."""
    return REFINED not in trial.user_attrs and trial.params.get(BUILDER, COMPOSED) == COMPOSED


def was_interrupted(trial: FrozenTrial) -> bool:
    """Whether a trial failed for a reason outside its plan, so that the plan may be measured again."""
    return trial.state == TrialState.FAIL and bool(trial.user_attrs.get(INTERRUPTED))


def enqueued_point(trial: FrozenTrial) -> Genome:
    """The point with which a trial was enqueued, else its parameters."""
    found = trial.system_attrs.get("fixed_params")
    return found if isinstance(found, dict) else trial.params


def kind_of(trial: FrozenTrial) -> str:
    """The name of the builder whose plan a trial measures, else the origin of its point."""
    origin = str(attribute(trial, ORIGIN) or "drawn")
    return str(trial.params.get(BUILDER, origin)) if origin in (BASELINE, BUILT) else origin
