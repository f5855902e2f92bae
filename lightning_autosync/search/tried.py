"""What a trial of a study says: its plan, its steps, how its point came about."""

from __future__ import annotations

import statistics
from contextlib import suppress
from typing import Any, Protocol

from optuna.trial import FrozenTrial, TrialState

from lightning_autosync.documents import LONGEST, Index, Taken, checked, parse_json
from lightning_autosync.errors import PlanError
from lightning_autosync.measure.drift import Sight
from lightning_autosync.plan import SyncPlan
from lightning_autosync.plan.space import BUILDER, COMPOSED, Genome, PlanSpace
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
_SAID: dict[str, Any] = {
    **dict.fromkeys((ORIGIN, PLAN, REFINED, ERROR, RUN), str),
    **dict.fromkeys((PREDICTED, REFERENCE, PRICE), Taken),
    STEPS: list[list[Taken]],
    INTERRUPTED: bool,
    BATCH: Index,
}
"""What each of them is."""


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
    return SyncPlan.from_dict(parse_json(text, REFINED, PlanError), REFINED)


def sight_of(trial: FrozenTrial) -> Sight:
    """What a trial tells of drift."""
    steps = measured_steps(trial) if trial.state.is_finished() else ()
    return Sight(
        run=told(trial, RUN),
        number=trial.number,
        batch=told(trial, BATCH),
        reference=told(trial, REFERENCE),
        seconds=statistics.median(steps) if steps else None,
        price=told(trial, PRICE),
        baseline=trial.user_attrs.get(ORIGIN) in (BASELINE, BUILT),
    )


def told(trial: Tried, name: str) -> Any:
    """What a trial says by one of the attributes above; None if it does not say it.

    Raises:
        StudyError: it says something else.
    """
    value = trial.user_attrs.get(name)
    return None if value is None else checked(_SAID[name], value, f"trial {trial.number}: {name}", StudyError)


def time_of(value: Any) -> float | None:
    """A value that Optuna keeps, if it can be the seconds of a step."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value <= LONGEST else None


def measured_steps(trial: FrozenTrial) -> tuple[float, ...]:
    """Seconds of each measured step of the slowest rank; of a trial without, its value alone; empty if it has none."""
    if by_rank := [steps for steps in told(trial, STEPS) or () if steps]:
        return tuple(max(by_rank, key=statistics.median))
    value = trial.value if trial.state == TrialState.COMPLETE else None
    if value is None:
        with suppress(ValueError):
            value = trial.intermediate_values[max(trial.intermediate_values)]
    seconds = time_of(value)
    return () if seconds is None else (seconds,)


def seconds_of(trial: FrozenTrial) -> float | None:
    """Seconds of a step of a trial's plan: its value, or, if it was given up, the median of the steps that it made;
    None where it has no time."""
    if trial.state == TrialState.COMPLETE and trial.value is not None:
        return time_of(trial.value)
    if trial.state == TrialState.PRUNED and (steps := measured_steps(trial)):
        return statistics.median(steps)
    return None


def is_composed(trial: FrozenTrial) -> bool:
    """Whether a trial's parameters tell its plan: it is no builder's, and none that refines the point."""
    return REFINED not in trial.user_attrs and trial.params.get(BUILDER, COMPOSED) == COMPOSED


def was_interrupted(trial: FrozenTrial) -> bool:
    """Whether a trial ended before anything was learned of its plan, so that the plan may be tried again."""
    return trial.state == TrialState.FAIL and bool(trial.user_attrs.get(INTERRUPTED))


def given_point(trial: FrozenTrial) -> Genome:
    """The point that a trial was given, or else the one that it has come to."""
    found = trial.system_attrs.get("fixed_params")
    return found if isinstance(found, dict) else trial.params


def kind_of(trial: FrozenTrial) -> str:
    """How a trial's point came about, or the builder that it stands for."""
    origin = str(told(trial, ORIGIN) or "drawn")
    return str(trial.params.get(BUILDER, origin)) if origin in (BASELINE, BUILT) else origin
