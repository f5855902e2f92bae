"""Trials as records of a result, and their ranking at a common speed of the machine."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

from optuna.trial import FrozenTrial, TrialState
from pydantic import ConfigDict

from lightning_autosync.documents import Duration, Index, PositiveDuration, Record
from lightning_autosync.measure.drift import Drift, DriftCorrection, DriftObservation
from lightning_autosync.measure.step_time import Steps
from lightning_autosync.plan.space import BUILDER, COMPOSED
from lightning_autosync.search.trial_attributes import (
    BASELINE,
    BATCH,
    BUILT,
    ELAPSED,
    ERROR,
    ORIGIN,
    PLAN,
    PREDICTED,
    PRICE,
    REFERENCE,
    REFINED,
    RUN,
    SECONDS,
    STEPS,
    attribute,
    measured_steps,
    step_time,
    was_interrupted,
)
from lightning_autosync.step_times import job_steps

LENIENT = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)
"""Configuration for parts of results: unknown fields are ignored, since later releases may write more."""
State = Literal["complete", "pruned", "failed"]
STATES: Mapping[TrialState, State] = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


class TrialRecord(Record):
    """A finished trial in ``autosync-tuning/1``.

    Attributes:
        number: number of the trial in the order of proposals, counted from 0.
        origin: ``baseline`` (a builder's plan, enqueued), ``evolved``, ``refined``, ...
        state: ``complete``; ``pruned``, stopped early because it was clearly slower; or ``failed``, without a time.
        seconds: median seconds of a step; None if it was not measured.
        predicted: seconds of a step, predicted by the simulator at the proposal.
        steps: seconds of each measured step, the mean of ranks, as a list with one list. The study has all ranks. In
            results of earlier releases by rank, or one list.
        elapsed: total seconds of the trial.
        error: why it failed or was stopped.
        builder: name of the builder if it is a builder's plan.
        plan: fingerprint of the plan.
        reference: seconds of a step of the reference plan, measured with its batch.
        batch: number of the first trial of its batch.
        run: name of the run that measured it.
        interrupted: whether it failed for a reason outside its plan, so that the plan may be measured again.
        price: seconds of a step, predicted by the replay.
        corrected: ``seconds`` at the speed of the machine during this run; None in results of earlier releases.
    """

    model_config = LENIENT

    number: Index
    origin: str
    state: State
    seconds: PositiveDuration | None = None
    predicted: PositiveDuration | None = None
    steps: tuple[Duration | tuple[Duration, ...], ...] | None = None
    elapsed: Duration | None = None
    error: str | None = None
    builder: str | None = None
    plan: str | None = None
    reference: PositiveDuration | None = None
    batch: Index | None = None
    run: str | None = None
    interrupted: bool = False
    price: PositiveDuration | None = None
    corrected: PositiveDuration | None = None

    @classmethod
    def of(cls, trial: FrozenTrial) -> TrialRecord:
        """The record of a finished trial of a study.

        Raises:
            StudyError: an attribute has a wrong type.
        """
        builder = COMPOSED if REFINED in trial.user_attrs else trial.params.get(BUILDER, COMPOSED)
        # The attributes are checked one by one, so they need no validation here; long studies have many steps.
        return cls.model_construct(
            number=trial.number,
            origin=attribute(trial, ORIGIN) or "unknown",
            state=STATES[trial.state],
            seconds=step_time(trial.user_attrs.get(SECONDS)) if measured_steps(trial) else None,
            predicted=attribute(trial, PREDICTED),
            steps=_of_job(attribute(trial, STEPS) or ()),
            elapsed=step_time(trial.user_attrs.get(ELAPSED)),
            error=attribute(trial, ERROR),
            builder=None if builder == COMPOSED else str(builder),
            plan=attribute(trial, PLAN),
            reference=attribute(trial, REFERENCE),
            batch=attribute(trial, BATCH),
            run=attribute(trial, RUN),
            interrupted=was_interrupted(trial),
            price=attribute(trial, PRICE),
        )


def _of_job(by_rank: Steps) -> tuple[tuple[float, ...], ...]:
    """The means of ranks alone: the steps of all ranks would make a result too large to be read."""
    found = job_steps([steps for steps in by_rank if steps])
    return (tuple(found),) if found else ()


def of_run(records: Sequence[TrialRecord], run: str | None) -> list[TrialRecord]:
    """The records of one run; all records if ``run`` is None."""
    return [record for record in records if run is None or record.run == run]


def correction_of(
    records: Sequence[TrialRecord], run: str | None = None, now: Mapping[int, float] | None = None
) -> DriftCorrection:
    """The correction of seconds to the speed of one run, by the reference plan beside each batch.

    Args:
        run: target run; None treats all trials as one run.
        now: by trial, further seconds of the reference in that run, of a batch without finished trials.
    """
    observed = (
        DriftObservation(
            run=None if run is None else record.run,
            number=record.number,
            batch=record.batch,
            reference=record.reference,
            seconds=record.seconds,
            price=record.price,
            baseline=record.origin in (BASELINE, BUILT),
        )
        for record in records
    )
    return DriftCorrection.of(observed, run, now)


def drift_of(records: Sequence[TrialRecord], run: str | None = None) -> Drift:
    """The drift of the machine during one run; during all trials if ``run`` is None."""
    return correction_of(records, run).base


def ranked(
    records: Sequence[TrialRecord],
    run: str | None = None,
    now: Mapping[int, float] | None = None,
    states: Sequence[str] = ("complete",),
) -> list[tuple[TrialRecord, float]]:
    """Trials with their corrected seconds, fastest first.

    A plan that was measured several times has the median of its times and is represented by its first trial.

    Args:
        run: run to whose speed seconds are corrected; None treats all trials as one run.
        now: as in `correction_of`.
    """
    correction = correction_of(records, run, now)
    by_plan: dict[str, list[tuple[TrialRecord, float]]] = {}
    for record in records:
        if record.state in states and record.seconds is not None and record.plan is not None:
            seconds = correction.convert(None if run is None else record.run, record.number, record.seconds)
            by_plan.setdefault(record.plan, []).append((record, seconds))
    best = [(found[0][0], statistics.median(seconds for _, seconds in found)) for found in by_plan.values()]
    return sorted(best, key=lambda pair: pair[1])
