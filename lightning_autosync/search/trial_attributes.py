"""What a trial of a study carries: its plan, its steps, how its point came about."""

from __future__ import annotations

import statistics
from contextlib import suppress
from typing import Any, Protocol

from optuna.trial import FrozenTrial, TrialState

from lightning_autosync.documents import LONGEST, Index, Taken, checked, parse_json
from lightning_autosync.errors import PlanError
from lightning_autosync.measure.drift import DriftObservation
from lightning_autosync.plan import SyncPlan
from lightning_autosync.plan.space import BUILDER, COMPOSED, Genome, PlanSpace
from lightning_autosync.search.storages import StudyError

ORIGIN, PREDICTED, STEPS, PLAN = "autosync:origin", "autosync:predicted", "autosync:steps", "autosync:plan"
"""User attributes of a trial: how its point came about, seconds of a step as estimated when it was chosen, seconds of
each measured step (a list a rank), and the fingerprint of its plan."""
REFINED = "autosync:refined"
"""The document of a plan that refines the trial's point and is measured in its place, as JSON text."""
ERROR, INTERRUPTED = "autosync:error", "autosync:interrupted"
"""Why a trial failed or was stopped early; whether the cause lay outside its plan, as with a Ctrl-C."""
CTRL_C = "interrupted"
"""The `ERROR` of a trial that a Ctrl-C ended."""
RUN, BATCH, REFERENCE, PRICE = "autosync:run", "autosync:batch", "autosync:reference", "autosync:price"
"""The run (the name of its directory), the number of the first trial of the batch, seconds of a step of the study's
reference plan beside that batch, and seconds of the trial's plan by the replay."""
SECONDS, ELAPSED, OWNER = "autosync:seconds", "autosync:elapsed", "autosync:owner"
"""The median step, the seconds that the trial took in all, and the process that it belongs to."""
BASELINE, BUILT = "baseline", "builder"
"""Origins of points that stand for a builder's plan: of those enqueued first, and of those that a sampler proposes."""
_TYPES: dict[str, Any] = {
    **dict.fromkeys((ORIGIN, PLAN, REFINED, ERROR, RUN), str),
    **dict.fromkeys((PREDICTED, REFERENCE, PRICE), Taken),
    STEPS: list[list[Taken]],
    INTERRUPTED: bool,
    BATCH: Index,
}


class TrialLike(Protocol):
    """A live or a finished trial of Optuna."""

    @property
    def number(self) -> int: ...

    @property
    def params(self) -> dict[str, Any]: ...

    @property
    def user_attrs(self) -> dict[str, Any]: ...


def attribute(trial: TrialLike, name: str) -> Any:
    """One of the attributes above, but for `SECONDS`, `ELAPSED` and `OWNER`; None if the trial does not have it.

    Raises:
        StudyError: it is of another type.
    """
    value = trial.user_attrs.get(name)
    return None if value is None else checked(_TYPES[name], value, f"trial {trial.number}: {name}", StudyError)


def plan_of(trial: TrialLike, space: PlanSpace) -> SyncPlan:
    """The plan of a trial: the one that refines its point, if it carries one, else the point's own.

    Raises:
        StudyError: its parameters are not those of the space, or the plan that it carries cannot be read.
    """
    try:
        refined = trial.user_attrs.get(REFINED)
        return space.plan(trial.params) if refined is None else refined_plan(refined)
    except PlanError as error:
        raise StudyError(f"trial {trial.number}: {error}") from None


def refined_plan(text: str) -> SyncPlan:
    """The plan that a trial carries as `REFINED`.

    Raises:
        PlanError: the text is no plan.
    """
    return SyncPlan.from_dict(parse_json(text, REFINED, PlanError), REFINED)


def drift_observation(trial: FrozenTrial) -> DriftObservation:
    """What a trial tells of drift."""
    steps = measured_steps(trial) if trial.state.is_finished() else ()
    return DriftObservation(
        run=attribute(trial, RUN),
        number=trial.number,
        batch=attribute(trial, BATCH),
        reference=attribute(trial, REFERENCE),
        seconds=statistics.median(steps) if steps else None,
        price=attribute(trial, PRICE),
        baseline=trial.user_attrs.get(ORIGIN) in (BASELINE, BUILT),
    )


def step_time(value: Any) -> float | None:
    """A value from a study, if it can be the seconds of a step; else None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value <= LONGEST else None


def measured_steps(trial: FrozenTrial) -> tuple[float, ...]:
    """Seconds of each measured step of the slowest rank; the value alone of a trial without; empty if it has none."""
    if by_rank := [steps for steps in attribute(trial, STEPS) or () if steps]:
        return tuple(max(by_rank, key=statistics.median))
    value = trial.value if trial.state == TrialState.COMPLETE else None
    if value is None:
        with suppress(ValueError):
            value = trial.intermediate_values[max(trial.intermediate_values)]
    seconds = step_time(value)
    return () if seconds is None else (seconds,)


def seconds_of(trial: FrozenTrial) -> float | None:
    """Seconds of a step of a trial's plan: its value, or the median of the steps of a pruned trial; None without."""
    if trial.state == TrialState.COMPLETE and trial.value is not None:
        return step_time(trial.value)
    if trial.state == TrialState.PRUNED and (steps := measured_steps(trial)):
        return statistics.median(steps)
    return None


def is_composed(trial: FrozenTrial) -> bool:
    """Whether a trial's parameters alone determine its plan: it is no builder's, and refines no point."""
    return REFINED not in trial.user_attrs and trial.params.get(BUILDER, COMPOSED) == COMPOSED


def was_interrupted(trial: FrozenTrial) -> bool:
    """Whether a trial ended before its plan was measured, so that the plan may be measured again."""
    return trial.state == TrialState.FAIL and bool(trial.user_attrs.get(INTERRUPTED))


def enqueued_point(trial: FrozenTrial) -> Genome:
    """The point that a trial was enqueued with, or else its parameters."""
    found = trial.system_attrs.get("fixed_params")
    return found if isinstance(found, dict) else trial.params


def kind_of(trial: FrozenTrial) -> str:
    """The name of the builder whose plan a trial measures, or else how its point came about."""
    origin = str(attribute(trial, ORIGIN) or "drawn")
    return str(trial.params.get(BUILDER, origin)) if origin in (BASELINE, BUILT) else origin
