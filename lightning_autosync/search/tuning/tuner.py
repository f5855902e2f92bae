"""`Tuner`: measures batches of trials on live workers until the budget is spent, and reports how far it is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import optuna

from lightning_autosync.documents import seconds_text
from lightning_autosync.errors import DocumentError, TuningError
from lightning_autosync.interrupts import uninterrupted
from lightning_autosync.learned import ReplayEstimator
from lightning_autosync.measure.interleaving import StoppingRule, TrialMeasurement, measure_in_turns
from lightning_autosync.measure.progress import Report, silent
from lightning_autosync.measure.reference import ReferencePlan
from lightning_autosync.measure.session import Contender, MeasurementSession
from lightning_autosync.plan import SyncPlan, compile_plan
from lightning_autosync.search.trial_attributes import CTRL_C, PREDICTED, PRICE
from lightning_autosync.search.tuning.job import TuningJob
from lightning_autosync.search.tuning.opponents import Opponents
from lightning_autosync.search.tuning.records import TrialRecord, correction_of, drift_of, of_run, ranked
from lightning_autosync.search.tuning.trials import Trials


@dataclass(frozen=True)
class PendingTrial:
    """A trial that is being measured."""

    trial: optuna.Trial
    measurement: TrialMeasurement


@dataclass
class Batch:
    """Trials that are proposed at once and measured in turns.

    Attributes:
        asked: all trials.
        pending: trials whose plans compile.
        reference: seconds of a step of the reference plan just before the batch; None if unknown.
    """

    asked: list[optuna.Trial] = field(default_factory=list)
    pending: list[PendingTrial] = field(default_factory=list)
    reference: float | None = None


class Tuner:
    """Asks the study for plans, measures them, and tells the study their times.

    Args:
        session: live workers of the job.
        opponents: opponents, among them the best DDP.
        reference: reference plan, which shows the drift of the machine.
        replay: predicts the time of each plan before it is measured; None if the rates of the links are unknown.
        report: told of each batch of trials.
    """

    def __init__(
        self,
        job: TuningJob,
        session: MeasurementSession,
        trials: Trials,
        opponents: Opponents,
        reference: ReferencePlan,
        replay: ReplayEstimator | None = None,
        report: Report = silent,
    ) -> None:
        self._job = job
        self._report = report
        self._session = session
        self._trials = trials
        self._opponents = opponents
        self._reference = reference
        self._replay = replay
        self._seconds = 0.0
        self._count = 0

    @property
    def trials_per_minute(self) -> float | None:
        """Trials per minute of this session; None before its first trial."""
        return 60 * self._count / self._seconds if self._count else None

    def run(self) -> None:
        """Spend the budget. Interrupted trials do not count.

        Running trials of other processes do not count either, because they may never end. So each of several processes
        on one study may start a last batch.

        Raises:
            TuningError: too many consecutive trials failed.
            LaunchError: workers cannot be started.
            KeyboardInterrupt: a Ctrl-C. Running trials are marked as interrupted; their plans may be measured again.
        """
        search = self._job.settings.search
        spent = self._spent()
        while len(spent) < search.budget:
            begin = time.perf_counter()
            count = min(search.batch, search.budget - len(spent))
            self._play_batch(count)
            self._seconds += time.perf_counter() - begin
            self._count += count
            spent = self._spent()
            self._report(len(spent), search.budget, standing(*self._state(spent)))
            self._check_failures(spent)
        self._reference.take_down()

    def _spent(self) -> list[TrialRecord]:
        return [record for record in self._trials.records() if not record.interrupted]

    def _play_batch(self, count: int) -> None:
        batch = Batch()
        try:
            for _ in range(count):
                self._ask(batch)
            batch.reference = self._reference.measure() if batch.pending else None
            # The reference is a builder's plan. If builders are trials, some trial should be as fast, so plans that are
            # far slower than the reference can be pruned before there is a best trial.
            reference = batch.reference if self._job.settings.search.tries_builders else None
            rule = StoppingRule(self._job.settings.trial, self._best_so_far(batch), reference)
            measurements = [one.measurement for one in batch.pending]
            measure_in_turns(self._session, measurements, rule, self._job.settings.trial.warm_up)
            self._tell(batch, batch.pending)
        except BaseException as error:
            self._end_early(batch, error)
            raise

    def _ask(self, batch: Batch) -> None:
        # A Ctrl-C between asking and noting the trial would leave it running in the study. But it may interrupt
        # `prepare`, which may take minutes and writes nothing.
        with uninterrupted():
            trial = self._trials.ask()
            batch.asked.append(trial)
        self._trials.prepare(trial)
        with uninterrupted():
            self._trials.suggest(trial)
            if (one := self._prepared(trial)) is not None:
                batch.pending.append(one)

    @uninterrupted()
    def _tell(self, batch: Batch, decided: Sequence[PendingTrial]) -> None:
        for one in decided:
            self._trials.tell(one.trial, one.measurement, batch.asked[0].number, batch.reference)

    @uninterrupted()
    def _end_early(self, batch: Batch, error: BaseException) -> None:
        """End the trials of a batch after an interruption or an error. Decided measurements are stored as they are."""
        ended = {record.number for record in self._trials.records()}
        decided = [one for one in batch.pending if one.measurement.state != "running" and one.trial.number not in ended]
        self._tell(batch, decided)
        ended |= {one.trial.number for one in decided}
        why = CTRL_C if isinstance(error, KeyboardInterrupt) else str(error)
        for trial in batch.asked:
            if trial.number not in ended:
                self._trials.interrupt(trial, why)

    def _prepared(self, trial: optuna.Trial) -> PendingTrial | None:
        """A trial whose plan is checked and priced; None if the plan does not compile, which fails the trial."""
        try:
            plan = self._trials.plan(trial)
            compile_plan(plan, self._job.workload, self._job.cluster)
        except DocumentError as error:
            self._trials.fail(trial, str(error))
            return None
        self._price(trial, plan)
        return PendingTrial(trial, TrialMeasurement(Contender(f"trial {trial.number}", self._job.plan_order(plan))))

    def _price(self, trial: optuna.Trial, plan: SyncPlan) -> None:
        """Store the replay's price of a plan, also as the prediction if the sampler made none."""
        if self._replay is None:
            return
        estimate = self._replay.estimate(self._job.workload, self._job.cluster, [plan])
        for name in (PRICE, PREDICTED):
            self._trials.note(trial, name, float(estimate.seconds[0]))

    def _best_so_far(self, batch: Batch) -> float | None:
        """Seconds with which plans of a batch are compared: those of the fastest trial so far; None if there is none.

        DDP does not count: if it is faster than all plans, the best plan still has to be found. Trials of other runs
        count only after this run has trials, which show the relative speed of its machine.
        """
        records, own = self._trials.records(), self._trials.own
        if not of_run(records, own):
            return None
        now = {} if batch.reference is None else {batch.asked[0].number: batch.reference}
        best = ranked(records, own, now)
        return correction_of(records, own, now).base.expected(best[0][1]) if best else None

    def _state(self, records: Sequence[TrialRecord]) -> tuple[tuple[int, float] | None, int, float]:
        """Number and seconds of the fastest trial, number of failed trials of this run, and seconds of the best DDP."""
        own = self._trials.own
        best = ranked(records, own)
        failed = sum(record.state == "failed" for record in of_run(records, own))
        ddp = self._opponents.fastest("ddp", drift_of(records, own))
        return (best[0][0].number, best[0][1]) if best else None, failed, ddp[0].seconds

    def _check_failures(self, records: Sequence[TrialRecord]) -> None:
        """Raise after too many consecutive failures of this run; another run's machine may be broken."""
        limit = self._job.settings.search.max_failures
        last = of_run(records, self._trials.own)[-limit:]
        if len(last) == limit and all(record.state == "failed" for record in last):
            raise TuningError(f"the last {limit} trials failed; latest error: {last[-1].error}")


def standing(best: tuple[int, float] | None, failed: int, ddp: float) -> str:
    """How far the search is, in words.

    Args:
        best: number and seconds of the fastest trial; None if no trial has a time.
        failed: number of failed trials.
        ddp: seconds of the best DDP.
    """
    text = "no plan measured yet"
    if best is not None:
        number, seconds = best
        text = f"best {seconds_text(seconds)} (trial {number}), speedup over DDP {ddp / seconds:.2f}x"
    return f"{text}, {failed} failed" if failed else text
