"""`Tuner`: batches of trials on live workers until the budget is spent."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import optuna

from lightning_autosync.errors import AutoSyncError, DocumentError
from lightning_autosync.plan import SyncPlan, compile_plan
from lightning_autosync.search.studies import PREDICTED
from lightning_autosync.search.tuning.job import Job
from lightning_autosync.search.tuning.measuring import Course, Rule, measure_in_turns
from lightning_autosync.search.tuning.opponents import Opponent
from lightning_autosync.search.tuning.progress import TuningProgress
from lightning_autosync.search.tuning.stage import Entrant, Stage, TrialError
from lightning_autosync.search.tuning.trials import INTERRUPTED, Record, Trials, drift_of, is_baseline, ranked
from lightning_autosync.simulator.learned import Estimator

REFERENCE_TRIAL = "autosync:reference"
"""User attribute of a study: the number of the trial whose plan shows the machine's drift."""
_REFERENCE_STEPS = 2
_log = logging.getLogger(__name__)


class TuningError(AutoSyncError, RuntimeError):
    """A run cannot go on; the study keeps what was found."""


@dataclass(frozen=True)
class Pending:
    """A trial that is being measured."""

    trial: optuna.Trial
    course: Course


class Tuner:
    """Asks for plans, measures them, and tells what they took.

    Args:
        job: what is tuned.
        stage: its live workers.
        trials: the study.
        ddp: the best DDP, with which plans are compared from the start.
        estimator: prices each plan before it is measured; None where rates are unknown.
        reference: the plan that shows the machine's drift; None takes the fastest builder's among the trials.
    """

    def __init__(
        self,
        job: Job,
        stage: Stage,
        trials: Trials,
        ddp: Opponent,
        estimator: Estimator | None = None,
        reference: SyncPlan | None = None,
    ) -> None:
        self._job = job
        self._stage = stage
        self._trials = trials
        self._ddp = ddp
        self._estimator = estimator
        self._reference_plan = reference
        self._reference: Entrant | None = None
        self._seconds = 0.0
        self._count = 0

    @property
    def trials_per_minute(self) -> float | None:
        """Of this session; None before its first trial."""
        return 60 * self._count / self._seconds if self._count else None

    def run(self) -> None:
        """Spend the budget.

        Raises:
            TuningError: too many trials failed one after the other.
            LaunchError: workers cannot be started.
            KeyboardInterrupt: as it came; trials that were under way are failed ones.
        """
        search = self._job.settings.search
        records = self._trials.records()
        with TuningProgress(search.budget, len(records), self._ddp.seconds) as progress:
            while len(records) < search.budget:
                begin = time.perf_counter()
                self._play_batch(min(search.batch, search.budget - len(records)))
                before, records = len(records), self._trials.records()
                self._seconds += time.perf_counter() - begin
                self._count += len(records) - before
                progress.show(len(records), *_standing(records))
                self._check_failures(records)
        self._forget_reference()

    def _play_batch(self, count: int) -> None:
        batch: list[Pending] = []
        asked: list[optuna.Trial] = []
        try:
            for _ in range(count):
                asked.append(self._trials.ask())
            batch = [one for trial in asked if (one := self._prepared(trial)) is not None]
            reference = self._measure_reference() if batch else None
            rule = Rule(self._job.settings.trial, self._best_so_far())
            measure_in_turns(self._stage, [one.course for one in batch], rule, self._job.settings.trial.warm_up)
            for one in batch:
                self._trials.tell(one.trial, one.course, asked[0].number, reference)
        except BaseException as error:
            self._give_up(asked, error)
            raise

    def _give_up(self, asked: Sequence[optuna.Trial], error: BaseException) -> None:
        """End what an interruption or an error left running."""
        ended = {record.number for record in self._trials.records()}
        why = INTERRUPTED if isinstance(error, KeyboardInterrupt) else str(error)
        for trial in asked:
            if trial.number not in ended:
                self._trials.fail(trial, why)

    def _prepared(self, trial: optuna.Trial) -> Pending | None:
        """A trial whose plan is checked and priced; None where it is wrong, which is told to the study."""
        try:
            plan = self._trials.plan(trial)
            compile_plan(plan, self._job.workload, self._job.cluster)
        except DocumentError as error:
            self._trials.fail(trial, str(error))
            return None
        self._predict(trial, plan)
        return Pending(trial, Course(self._stage.entrant(f"trial {trial.number}", self._job.plan_order(plan))))

    def _predict(self, trial: optuna.Trial, plan: SyncPlan) -> None:
        if self._estimator is None or PREDICTED in trial.user_attrs:
            return
        estimate = self._estimator.estimate(self._job.workload, self._job.cluster, [plan])
        trial.set_user_attr(PREDICTED, float(estimate.seconds[0]))

    def _best_so_far(self) -> float | None:
        """Seconds that a plan is compared with: those of the fastest trial as it would be now; None without one.

        DDP is no measure: where it is faster than all plans, the best of them still has to be known.
        """
        records = self._trials.records()
        best = ranked(records)
        return drift_of(records).expected(best[0][1]) if best else None

    def _measure_reference(self) -> float | None:
        """Seconds of the reference just now; None before the builders' plans are through, and if it failed."""
        if self._reference is None and (plan := self._choose_reference()) is not None:
            self._reference = self._stage.entrant("reference", self._job.plan_order(plan))
        if self._reference is None:
            return None
        course = Course(self._reference)
        try:
            if not self._stage.live(self._reference):
                for _ in range(self._job.settings.trial.warm_up):
                    self._stage.measure(self._reference, 1)
            course.add(self._stage.measure(self._reference, _REFERENCE_STEPS))
        except TrialError as error:
            _log.warning("the reference failed: %s", error)
        return course.seconds

    def _choose_reference(self) -> SyncPlan | None:
        """The plan that was given, or the fastest builder's; the study keeps which one, for sessions to come."""
        if self._reference_plan is not None or self._trials.waiting():
            return self._reference_plan
        study = self._trials.study
        if REFERENCE_TRIAL not in study.user_attrs:
            best = ranked([record for record in self._trials.records() if is_baseline(record)])
            if not best:
                return None
            study.set_user_attr(REFERENCE_TRIAL, best[0][0].number)
        return self._trials.plan_of(study.user_attrs[REFERENCE_TRIAL])

    def _forget_reference(self) -> None:
        if self._reference is not None:
            self._stage.take_down(self._reference)
            self._reference = None

    def _check_failures(self, records: Sequence[Record]) -> None:
        limit = self._job.settings.search.failures
        last = records[-limit:]
        if len(last) == limit and all(record.state == "failed" for record in last):
            raise TuningError(f"the last {limit} trials failed, the latest one so: {last[-1].error}")


def _standing(records: Sequence[Record]) -> tuple[tuple[int, float] | None, int]:
    """The number and seconds of the fastest, and how many failed."""
    best = ranked(records)
    failed = sum(record.state == "failed" for record in records)
    return (best[0][0].number, best[0][1]) if best else None, failed
