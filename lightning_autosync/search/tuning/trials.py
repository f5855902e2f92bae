"""The study of a run: trials asked for, attribute, and read back as records."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from lightning_autosync.measure.drift import Drift, DriftCorrection, DriftObservation
from lightning_autosync.measure.interleaving import TrialMeasurement
from lightning_autosync.plan import SyncPlan
from lightning_autosync.plan.space import BUILDER, COMPOSED
from lightning_autosync.search.sampler import AutoSyncSampler
from lightning_autosync.search.storages import storage_errors
from lightning_autosync.search.studies import suggest
from lightning_autosync.search.trial_attributes import (
    BASELINE,
    BATCH,
    BUILT,
    CTRL_C,
    ERROR,
    INTERRUPTED,
    ORIGIN,
    PLAN,
    PREDICTED,
    PRICE,
    REFERENCE,
    REFINED,
    RUN,
    STEPS,
    attribute,
    measured_steps,
    plan_of,
    step_time,
    was_interrupted,
)
from lightning_autosync.search.tuning.buckets import BucketSpace
from lightning_autosync.search.tuning.interruptions import uninterrupted
from lightning_autosync.search.tuning.owner import is_gone, this_process
from lightning_autosync.search.tuning.samplers import Space

SECONDS, ELAPSED, OWNER = "autosync:seconds", "autosync:elapsed", "autosync:owner"
"""Further user attributes of a trial: the median step; what the trial took; the process that it belongs to."""
_STATES = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}


@dataclass(frozen=True)
class Record:
    """A finished trial, as a result tells it; the fields are those of ``autosync-tuning/1``."""

    number: int
    origin: str
    state: str
    seconds: float | None
    predicted: float | None
    steps: list[list[float]]
    elapsed: float | None
    error: str | None
    builder: str | None
    plan: str | None
    reference: float | None
    batch: int | None
    run: str | None = None
    interrupted: bool = False
    price: float | None = None

    @classmethod
    def of(cls, trial: FrozenTrial) -> Record:
        """What its attributes say."""
        steps = measured_steps(trial)
        builder = COMPOSED if REFINED in trial.user_attrs else trial.params.get(BUILDER, COMPOSED)
        return cls(
            number=trial.number,
            origin=attribute(trial, ORIGIN) or "unknown",
            state=_STATES[trial.state],
            seconds=step_time(trial.user_attrs.get(SECONDS)) if steps else None,
            predicted=attribute(trial, PREDICTED),
            steps=attribute(trial, STEPS) or [],
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

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


@dataclass
class Trials:
    """The trials of one run in its study.

    Attributes:
        study: where they are.
        space: whose points they are.
        sampler: name of the sampler, the origin of trials for which it names none.
        run: the name of its directory (`identity`); a run that goes on ends what an interruption left of it.
        alone: whether nobody else works on the study, so that every trial that runs is a leftover.
        proposals: seconds that each proposal took.

    Methods that read or write the study raise `StorageError` where its storage does not answer.
    """

    study: optuna.Study
    space: Space
    sampler: str
    run: str
    alone: bool = False
    proposals: list[float] = field(default_factory=list)
    _last: list[FrozenTrial] = field(default_factory=list, init=False, repr=False)
    _is_lost: bool = field(default=False, init=False, repr=False)

    @property
    def own(self) -> str | None:
        """The run whose trials are this one's; None where all are."""
        return None if self.alone else self.run

    @storage_errors()
    def settle(self) -> int:
        """End the trials that an interruption left running, of this run or of a process that died; their number."""
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        left = [trial for trial in running if self._is_left(trial)]
        for trial in left:
            self.interrupt(trial)
        return len(left)

    @storage_errors()
    def ask(self) -> optuna.Trial:
        """A new trial, whose parameters are still to be suggested."""
        begin = time.perf_counter()
        trial = self.study.ask()
        trial.set_user_attr(RUN, self.run)
        trial.set_user_attr(OWNER, this_process())
        self.proposals.append(time.perf_counter() - begin)
        return trial

    def prepare(self, trial: optuna.Trial) -> None:
        """Let the sampler do beforehand what `suggest` would take long for: training a simulator may take minutes.

        Nothing is written to the study, so that a Ctrl-C need not wait.
        """
        if isinstance(self.study.sampler, AutoSyncSampler):
            with self._proposing():
                self.study.sampler.prepare(self._all(), trial.number)

    @storage_errors()
    def suggest(self, trial: optuna.Trial) -> None:
        """Give a new trial a value for each of its parameters."""
        with self._proposing():
            if isinstance(self.space, BucketSpace):
                self.space.suggest(trial)
            else:
                suggest(trial, self.space)
        if ORIGIN not in trial.user_attrs:
            trial.set_user_attr(ORIGIN, self.sampler)

    def plan(self, trial: optuna.Trial | FrozenTrial) -> SyncPlan:
        """The plan that a trial stands for."""
        return self.space.plan(trial.params) if isinstance(self.space, BucketSpace) else plan_of(trial, self.space)

    def plan_of(self, number: int) -> SyncPlan:
        """The plan of the finished trial with this number."""
        return next(self.plan(trial) for trial in self.finished() if trial.number == number)

    @storage_errors()
    def note(self, trial: optuna.Trial, name: str, value: Any) -> None:
        """Give a trial a user attribute that it does not have yet."""
        if name not in trial.user_attrs:
            trial.set_user_attr(name, value)

    @storage_errors()
    def tell(self, trial: optuna.Trial, measurement: TrialMeasurement, batch: int, reference: float | None) -> None:
        """Keep what was measured, and end the trial; ``reference`` are the seconds of that plan in its ``batch``."""
        trial.set_user_attr(BATCH, batch)
        trial.set_user_attr(ELAPSED, measurement.elapsed)
        trial.set_user_attr(STEPS, [list(steps) for steps in measurement.steps])
        trial.set_user_attr(PLAN, self.plan(trial).fingerprint)
        if reference is not None:
            trial.set_user_attr(REFERENCE, reference)
        if measurement.why is not None:
            trial.set_user_attr(ERROR, measurement.why)
        seconds = measurement.seconds
        if seconds is not None:
            trial.set_user_attr(SECONDS, seconds)
        if measurement.state == "complete":
            self._end(trial, TrialState.COMPLETE, seconds)
        elif measurement.state == "pruned" and seconds is not None:
            trial.report(seconds, measurement.count)
            self._end(trial, TrialState.PRUNED)
        else:
            self._end(trial, TrialState.FAIL)

    @storage_errors()
    def fail(self, trial: optuna.Trial, why: str) -> None:
        """End a trial that was not measured."""
        trial.set_user_attr(ERROR, why)
        self._end(trial, TrialState.FAIL)

    @storage_errors()
    def interrupt(self, trial: optuna.Trial | FrozenTrial, why: str = CTRL_C) -> None:
        """End a trial that was broken off by nothing of its plan's doing; the plan may be tried again."""
        with suppress(optuna.exceptions.UpdateFinishedTrialError):  # another process has ended it
            for name, value in ((ERROR, why), (INTERRUPTED, True)):
                self.study._storage.set_trial_user_attr(trial._trial_id, name, value)
            self.study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)

    def lose(self) -> None:
        """From now on what was read last counts, since the storage does not answer any more."""
        self._is_lost = True

    @uninterrupted()
    @storage_errors()
    def finished(self) -> list[FrozenTrial]:
        """Those that ended, in whatever way, in order."""
        if not self._is_lost:
            self._last = self.study.get_trials(deepcopy=False, states=tuple(_STATES))
        return self._last

    def records(self) -> list[Record]:
        """The same, as records."""
        return [Record.of(trial) for trial in self.finished()]

    def _is_left(self, trial: FrozenTrial) -> bool:
        mine = self.alone or trial.user_attrs.get(RUN) == self.run
        return mine or is_gone(str(trial.user_attrs.get(OWNER, "")))

    def _end(self, trial: optuna.Trial, state: TrialState, value: float | None = None) -> None:
        """What a sampler does with a finished trial counts, too."""
        with self._proposing():
            self.study.tell(trial, value, state=state)

    @uninterrupted()
    @storage_errors()
    def _all(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    @contextmanager
    def _proposing(self) -> Iterator[None]:
        """What is done within the block is overhead of the last proposal."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            if self.proposals:
                self.proposals[-1] += time.perf_counter() - begin


def of_run(records: Sequence[Record], run: str | None) -> list[Record]:
    """Those of one run; all where ``run`` is None."""
    return [record for record in records if run is None or record.run == run]


def footing_of(
    records: Sequence[Record], run: str | None = None, now: Mapping[int, float] | None = None
) -> DriftCorrection:
    """The footing of one run, which the reference shows that had a turn beside each of its batches.

    Args:
        records: of the study.
        run: None takes all trials to be of one run.
        now: further turns of that run, as of a batch none of whose trials has ended.
    """
    sights = (
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
    return DriftCorrection.of(sights, run, now)


def drift_of(records: Sequence[Record], run: str | None = None) -> Drift:
    """The drift of the machine of one run; of all trials where ``run`` is None."""
    return footing_of(records, run).base


def ranked(
    records: Sequence[Record],
    run: str | None = None,
    now: Mapping[int, float] | None = None,
    states: Sequence[str] = ("complete",),
) -> list[tuple[Record, float]]:
    """Trials that ran to their end with their seconds (corrected where the machine drifted), fastest first.

    Of a plan that was tried several times the median counts, and its first trial stands for it.

    Args:
        records: of the study.
        run: on whose footing the seconds are. None takes all trials to be of one run.
        now: as of `footing_of`.
        states: of the trials; with ``pruned``, those that were given up come too.
    """
    footing = footing_of(records, run, now)
    by_plan: dict[str, list[tuple[Record, float]]] = {}
    for record in records:
        if record.state in states and record.seconds is not None and record.plan is not None:
            seconds = footing.convert(None if run is None else record.run, record.number, record.seconds)
            by_plan.setdefault(record.plan, []).append((record, seconds))
    best = [(found[0][0], statistics.median(seconds for _, seconds in found)) for found in by_plan.values()]
    return sorted(best, key=lambda pair: pair[1])
