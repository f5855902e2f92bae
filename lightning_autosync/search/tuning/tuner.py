"""`Tuner`: batches of trials on live workers until the budget is spent."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import optuna

from lightning_autosync.errors import DocumentError
from lightning_autosync.learned import ReplayEstimator
from lightning_autosync.measure.interleaving import StoppingRule, TrialMeasurement, measure_in_turns
from lightning_autosync.measure.reference import ReferencePlan
from lightning_autosync.measure.session import Contender, MeasurementSession
from lightning_autosync.plan import SyncPlan, compile_plan
from lightning_autosync.search.trial_attributes import CTRL_C, PREDICTED, PRICE
from lightning_autosync.search.tuning.errors import TuningError
from lightning_autosync.search.tuning.interruptions import uninterrupted
from lightning_autosync.search.tuning.job import Job
from lightning_autosync.search.tuning.opponents import Opponents
from lightning_autosync.search.tuning.progress import TuningProgress
from lightning_autosync.search.tuning.trials import Record, Trials, drift_of, footing_of, of_run, ranked


@dataclass(frozen=True)
class Pending:
    """A trial that is being measured."""

    trial: optuna.Trial
    measurement: TrialMeasurement


@dataclass
class Batch:
    """Trials that are proposed at once and measured in turns.

    Attributes:
        asked: all of them.
        pending: those whose plans are sound.
        reference: seconds of the reference just before them; None if it has none.
    """

    asked: list[optuna.Trial] = field(default_factory=list)
    pending: list[Pending] = field(default_factory=list)
    reference: float | None = None


class Tuner:
    """Asks for plans, measures them, and tells what they took.

    Args:
        job: what is tuned.
        session: its live workers.
        trials: the study.
        opponents: DDP among them, with which plans are compared from the start.
        reference: it shows the machine's drift.
        replay: prices each plan before it is measured; None where rates are unknown.
    """

    def __init__(
        self,
        job: Job,
        session: MeasurementSession,
        trials: Trials,
        opponents: Opponents,
        reference: ReferencePlan,
        replay: ReplayEstimator | None = None,
    ) -> None:
        self._job = job
        self._session = session
        self._trials = trials
        self._opponents = opponents
        self._reference = reference
        self._replay = replay
        self._seconds = 0.0
        self._count = 0

    @property
    def trials_per_minute(self) -> float | None:
        """Of this session; None before its first trial."""
        return 60 * self._count / self._seconds if self._count else None

    def run(self) -> None:
        """Spend the budget; trials that were interrupted count for nothing.

        Of several processes on one study each may begin a last batch while the others' are under way; whether those
        ever end cannot be known of another machine, so they are not counted.

        Raises:
            TuningError: too many trials failed one after the other.
            LaunchError: workers cannot be started.
            KeyboardInterrupt: as it came; trials that were under way are failed ones, which may be tried again.
        """
        search = self._job.settings.search
        spent = self._spent()
        with TuningProgress(search.budget, len(spent)) as progress:
            while len(spent) < search.budget:
                begin = time.perf_counter()
                count = min(search.batch, search.budget - len(spent))
                self._play_batch(count)
                self._seconds += time.perf_counter() - begin
                self._count += count
                spent = self._spent()
                progress.show(len(spent), *self._standing(spent))
                self._check_failures(spent)
        self._reference.take_down()

    def _spent(self) -> list[Record]:
        return [record for record in self._trials.records() if not record.interrupted]

    def _play_batch(self, count: int) -> None:
        batch = Batch()
        try:
            for _ in range(count):
                self._ask(batch)
            batch.reference = self._reference.measure() if batch.pending else None
            # The reference is a builder's plan, so that, where these are trials, some trial should be as fast.
            seen = batch.reference if self._job.settings.search.tries_builders else None
            rule = StoppingRule(self._job.settings.trial, self._best_so_far(batch), seen)
            measurements = [one.measurement for one in batch.pending]
            measure_in_turns(self._session, measurements, rule, self._job.settings.trial.warm_up)
            self._tell(batch, batch.pending)
        except BaseException as error:
            self._give_up(batch, error)
            raise

    def _ask(self, batch: Batch) -> None:
        with uninterrupted():
            trial = self._trials.ask()
            batch.asked.append(trial)
        self._trials.prepare(trial)
        with uninterrupted():
            self._trials.suggest(trial)
            if (one := self._prepared(trial)) is not None:
                batch.pending.append(one)

    @uninterrupted()
    def _tell(self, batch: Batch, decided: Sequence[Pending]) -> None:
        for one in decided:
            self._trials.tell(one.trial, one.measurement, batch.asked[0].number, batch.reference)

    @uninterrupted()
    def _give_up(self, batch: Batch, error: BaseException) -> None:
        """End what an interruption or an error left running; what was decided counts, a plan that failed above all."""
        ended = {record.number for record in self._trials.records()}
        decided = [one for one in batch.pending if one.measurement.state != "running" and one.trial.number not in ended]
        self._tell(batch, decided)
        ended |= {one.trial.number for one in decided}
        why = CTRL_C if isinstance(error, KeyboardInterrupt) else str(error)
        for trial in batch.asked:
            if trial.number not in ended:
                self._trials.interrupt(trial, why)

    def _prepared(self, trial: optuna.Trial) -> Pending | None:
        """A trial whose plan is checked and priced; None where it is wrong, which is told to the study."""
        try:
            plan = self._trials.plan(trial)
            compile_plan(plan, self._job.workload, self._job.cluster)
        except DocumentError as error:
            self._trials.fail(trial, str(error))
            return None
        self._price(trial, plan)
        return Pending(trial, TrialMeasurement(Contender(f"trial {trial.number}", self._job.plan_order(plan))))

    def _price(self, trial: optuna.Trial, plan: SyncPlan) -> None:
        """Note what the replay says of a plan; it is what is predicted, too, unless the sampler predicted something."""
        if self._replay is None:
            return
        estimate = self._replay.estimate(self._job.workload, self._job.cluster, [plan])
        for name in (PRICE, PREDICTED):
            self._trials.note(trial, name, float(estimate.seconds[0]))

    def _best_so_far(self, batch: Batch) -> float | None:
        """Seconds that a plan is compared with: those of the fastest trial as it would be now; None without one.

        DDP is no measure: where it is faster than all plans, the best of them still has to be known. Nor are others'
        trials before this run has some: only these tell how much slower its machine is than theirs.
        """
        records, own = self._trials.records(), self._trials.own
        if not of_run(records, own):
            return None
        now = {} if batch.reference is None else {batch.asked[0].number: batch.reference}
        best = ranked(records, own, now)
        return footing_of(records, own, now).base.expected(best[0][1]) if best else None

    def _standing(self, records: Sequence[Record]) -> tuple[tuple[int, float] | None, int, float]:
        """The number and seconds of the fastest, how many of this run failed, and the seconds of the best DDP."""
        own = self._trials.own
        best = ranked(records, own)
        failed = sum(record.state == "failed" for record in of_run(records, own))
        ddp = self._opponents.fastest("ddp", drift_of(records, own))
        return (best[0][0].number, best[0][1]) if best else None, failed, ddp[0].seconds

    def _check_failures(self, records: Sequence[Record]) -> None:
        """Only what this run tried itself counts: another's machine may be broken."""
        limit = self._job.settings.search.failures
        last = of_run(records, self._trials.own)[-limit:]
        if len(last) == limit and all(record.state == "failed" for record in last):
            raise TuningError(f"the last {limit} trials failed, the latest one so: {last[-1].error}")
