"""A tuning run, from its settings to its result: open the study, measure opponents, spend the budget, compare."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_autosync.documents import counted, digest, identity
from lightning_autosync.errors import AutoSyncError, TuningError
from lightning_autosync.interrupts import uninterrupted
from lightning_autosync.learned import ReplayEstimator
from lightning_autosync.measure.drift import DriftCorrection
from lightning_autosync.measure.hosts import measured_hosts
from lightning_autosync.measure.progress import Report, silent
from lightning_autosync.measure.reference import ReferencePlan
from lightning_autosync.measure.session import MeasurementSession, reason
from lightning_autosync.measure.workers import WorkerError
from lightning_autosync.plan import SyncPlan
from lightning_autosync.plan.builders import build
from lightning_autosync.plan.space import PlanSpace
from lightning_autosync.replay import Constants
from lightning_autosync.search import studies
from lightning_autosync.search.passwords import without_passwords_in
from lightning_autosync.search.selection import rank_plans
from lightning_autosync.search.storages import StorageError, StudyError
from lightning_autosync.search.trial_attributes import BASELINE
from lightning_autosync.search.tuning.comparison import PREDICTED, FinalComparison, compare
from lightning_autosync.search.tuning.job import PriorKnowledge, TuningJob
from lightning_autosync.search.tuning.opponents import Opponents, builder_plans, settle_reference
from lightning_autosync.search.tuning.records import TrialRecord, correction_of, drift_of, ranked
from lightning_autosync.search.tuning.result import (
    Best,
    DriftRecord,
    Opponent,
    OpponentRecords,
    StudyAddress,
    Timing,
    TuningResult,
)
from lightning_autosync.search.tuning.samplers import BucketSpace, Space, make_sampler
from lightning_autosync.search.tuning.settings import SearchSettings, TuningSettings
from lightning_autosync.search.tuning.trials import Trials
from lightning_autosync.search.tuning.tuner import Tuner
from lightning_autosync.workload import Workload

JOURNAL = "study.journal"
MAX_RIVALS = 3
"""Maximum number of DDP settings in the final comparison, whose choosing rounds select the opponent among them."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TuningOutcome:
    """A finished run.

    Attributes:
        job: the tuned job.
        result: result of the run.
        storage: address of the study's storage, including any password.
        constants: constants of the hosts, by which plans were predicted.
    """

    job: TuningJob
    result: TuningResult
    storage: str
    constants: Constants

    @property
    def plan(self) -> SyncPlan | None:
        """The best plan; None if no plan has a time."""
        return None if self.result.best is None else SyncPlan.from_dict(self.result.best.plan)

    def __float__(self) -> float:
        return float(self.result)


class TuningRun:
    """One tuning run.

    Args:
        directory: directory of the run; that of an earlier run resumes it.
        saving: stack that blocks further interrupts after a first Ctrl-C, until the caller has written the result.
        report: told of each batch of trials.

    Raises:
        DocumentError: the model, the cluster, the simulator or a source of transfer is wrong.
    """

    def __init__(self, settings: TuningSettings, directory: Path, saving: ExitStack, report: Report = silent) -> None:
        self._saving = saving
        self._report = report
        self._settings = settings
        self._directory = directory
        self._storage = settings.study.storage or str(directory / JOURNAL)
        self._job = TuningJob.of(settings)
        self._prior = PriorKnowledge.of(self._job)
        self._begin = time.perf_counter()
        self._finalists: dict[str, SyncPlan] = {}

    def run(self) -> TuningOutcome:
        """Tune.

        A Ctrl-C, or an error after some trials have a time, ends the search early, as the result states. If the study's
        storage stops answering, the result has the trials that were read from it last. If the budget is spent already,
        only the final comparison is made.

        Raises:
            StudyError: the study is of another space, or cannot be opened.
            StorageError: the study's storage does not answer, before any trial has a time.
            TuningError: no DDP ran, or too many trials failed, before any trial has a time.
            LaunchError: workers cannot be started, before any trial has a time.
        """
        final, interrupted, failure = None, False, None
        with self._job.session() as session:
            self._job = self._with_times(session)
            self._measure_hosts(session)
            trials = self._open(self._space())
            reference = ReferencePlan(session, self._job.plan_order, self._settings.trial.warm_up)
            opponents = Opponents(self._job, session, reference, trials.study, trials.own)
            replay = ReplayEstimator(self._prior.constants) if self._job.cluster.measured else None
            tuner = Tuner(self._job, session, trials, opponents, reference, replay, self._report)
            try:
                builders = builder_plans(self._job)
                _log.info("measuring the reference plan, which shows the drift of the machine")
                settle_reference(reference, trials.study, self._by_price(builders))
                opponents.measure({} if self._settings.search.tries_builders else builders)
                tuner.run()
                final = self._compare(session, trials, opponents)
            except KeyboardInterrupt:
                # A second Ctrl-C must not lose the result before the caller has written it.
                self._saving.enter_context(uninterrupted())
                _log.warning("interrupted")
                interrupted = True
            except AutoSyncError as error:
                if isinstance(error, StorageError):
                    trials.freeze()  # the reads below would fail as well
                if not ranked(trials.records(), trials.own):
                    raise
                failure = reason(error)
            timing = Timing(
                trials_per_minute=tuner.trials_per_minute,
                sampler_seconds=sum(trials.proposals),
                sampler_seconds_by_proposal=tuple(trials.proposals),
                wall_seconds=time.perf_counter() - self._begin,
                restarts=session.restarts,
            )
        result = self._result(trials, opponents, final)
        ended = {"timing": timing, "interrupted": interrupted, "failure": failure}
        return TuningOutcome(self._job, result.model_copy(update=ended), self._storage, self._prior.constants)

    def _with_times(self, session: MeasurementSession) -> TuningJob:
        """The job with the times of its model: from the study if it has them, else measured now."""
        if self._settings.is_paced:
            return self._job
        with suppress(StudyError):
            known = studies.workload_of(studies.load_study(self._storage, self._settings.study.name))
            if _kinds(known) == _kinds(self._job.workload):
                return replace(self._job, workload=known)
        _log.info("measuring forward and backward passes")
        return self._job.profiled(session)

    def _measure_hosts(self, session: MeasurementSession) -> None:
        """Let predictions take the measured costs of hosts, unless the user or a fitted simulator has others."""
        settings = self._settings
        if settings.constants is not None or self._prior.fitted or not self._job.cluster.measured:
            return
        try:
            constants, told = measured_hosts(session, settings.launch_kind, settings.is_paced)
        except WorkerError as error:
            _log.warning("the hosts were not measured, so default costs are used: %s", reason(error))
            return
        self._prior = self._prior.with_constants(self._job, constants)
        _log.info("%s", told)

    def _space(self) -> Space:
        if self._settings.search.sampler == "horovod":
            return BucketSpace(self._job.workload, self._job.cluster)
        return PlanSpace(self._job.workload, self._job.cluster, self._settings.semantics)

    def _open(self, space: Space) -> Trials:
        settings = self._settings
        described: Any = space  # a `BucketSpace` has all attributes that a study needs of a `PlanSpace`
        # The baseline of a `BucketSpace` is Horovod's default, not a builder's plan, so it is always a trial.
        first = space.baselines() if settings.search.tries_builders or isinstance(space, BucketSpace) else []
        study = studies.open_study(self._storage, settings.study.name, described, first=first)
        if isinstance(space, PlanSpace):
            space = studies.space_of(study)  # with the domains that the study began with
            first = [point for point in first if space.has(point)]
        self._job.claim(study)
        alone = settings.study.storage is None
        trials = Trials(study, space, settings.search.sampler, identity(self._directory), alone)
        study.sampler = make_sampler(self._seeded(trials), space, self._prior)
        if count := trials.end_interrupted():
            _log.info(
                "%s interrupted: counted as failed, but the same plans may be tried again", counted(count, "trial")
            )
        studies.enqueue(study, space, first, BASELINE)  # again those baselines whose trials were interrupted
        return trials

    def _seeded(self, trials: Trials) -> SearchSettings:
        """The settings of the search with a seed of this session, since sessions must not draw the same plans."""
        search, finished = self._settings.search, len(trials.records())
        if search.seed is None or (trials.alone and not finished):
            return search
        own = int(digest([search.seed, trials.run, finished]), 16) % 2**32
        return search.model_copy(update={"seed": own})

    def _by_price(self, builders: Mapping[str, SyncPlan]) -> list[SyncPlan]:
        """Builders' plans, sorted by estimated seconds if there is an estimator."""
        plans = list(builders.values())
        if self._prior.estimator is None:
            return plans
        seconds = self._prior.estimator.estimate(self._job.workload, self._job.cluster, plans).seconds
        return [plans[place] for place in seconds.argsort(kind="stable")]

    def _best_builder(self, trials: Trials, opponents: Opponents) -> Opponent | None:
        """The best builder among the trials, or among the opponents measured before them.

        Pruned trials count too, since a plan of the search in the same batch may have been faster than all builders.
        """
        records = trials.records()
        if not self._settings.search.tries_builders:
            return next(iter(opponents.fastest("builder", drift_of(records, trials.own))), None)
        for record, seconds in ranked(records, trials.own, states=("complete", "pruned")):
            if record.builder is not None:
                return Opponent(name=record.builder, seconds=seconds)
        return None

    def _compare(self, session: MeasurementSession, trials: Trials, opponents: Opponents) -> dict[str, Any]:
        """The final comparison of the best builder's plan and the fastest others, as plain data."""
        records = trials.records()
        builder = self._best_builder(trials, opponents)
        plans = {} if builder is None else {builder.name: build(builder.name, self._job.workload, self._job.cluster)}
        known = {plan.fingerprint for plan in plans.values()}
        fastest = [record for record, _ in ranked(records, trials.own) if record.plan not in known]
        for record in fastest[: self._settings.finalists]:
            plans[record.builder or f"trial_{record.number}"] = trials.plan_of(record.number)
        if not plans:
            last = (records[-1].error or "unknown") if records else "none"
            raise TuningError(f"none of {len(records)} trials completed; last error: {last}")
        predicted = predicted_plan(self._job, self._prior.constants, self._settings.prediction_seconds)
        if predicted is not None:
            same = [name for name, plan in plans.items() if plan.fingerprint == predicted.fingerprint]
            if same:
                _log.info("%s is also the plan found by prediction alone", same[0])
            else:
                plans[PREDICTED] = predicted
        rivals = [one.name for one in opponents.fastest("ddp", drift_of(records, trials.own))[:MAX_RIVALS]]
        self._finalists = plans
        return compare(self._job, session, plans, rivals, self._directory)

    def _result(self, trials: Trials, opponents: Opponents, final: dict[str, Any] | None) -> TuningResult:
        settings, job = self._settings, self._job
        records, own = trials.records(), trials.own
        correction = correction_of(records, own)
        measured = opponents.to_dict()
        return TuningResult(
            settings=without_passwords_in(settings.model_dump(mode="json")),
            cluster=job.cluster.to_dict(),
            workload={"bytes": job.workload.bytes, **job.workload.to_dict()},
            semantics=settings.semantics,
            constants=self._prior.constants.to_dict(),
            study=StudyAddress(name=settings.study.name, storage=without_passwords_in(self._storage)),
            best=self._best(trials, final),
            opponents=OpponentRecords(
                ddp=next(iter(opponents.fastest("ddp", correction.base)), None),
                builder=self._best_builder(trials, opponents),
                measured=tuple(measured["measured"]),
                reference_by_batch=measured["reference_by_batch"],
            ),
            trials=tuple(_corrected(record, correction, own) for record in records),
            final=final,
            emulated={"links": settings.emulated, "compute": settings.model.kind == "paced"},
            drift=DriftRecord(**correction.base.to_dict()),
            environment={} if final is None else final["conditions"],
        )

    def _best(self, trials: Trials, final: dict[str, Any] | None) -> Best | None:
        """The winner of the final comparison, else the fastest trial."""
        records = trials.records()
        if final is None:
            fastest = ranked(records, trials.own)
            return _best_of(*fastest[0], trials.plan_of(fastest[0][0].number)) if fastest else None
        comparison = FinalComparison.read(final, "the final comparison")
        plan = self._finalists[comparison.winner]
        for record, _ in ranked(records, trials.own, states=("complete", "pruned")):
            if record.plan == plan.fingerprint:
                return _best_of(record, comparison.seconds, plan)
        predicted = comparison.winner == PREDICTED
        return Best(
            origin=PREDICTED if predicted else BASELINE,
            seconds=comparison.seconds,
            builder=None if predicted else comparison.winner,
            plan=plan.to_dict(),
        )


def predicted_plan(job: TuningJob, constants: Constants, seconds: float) -> SyncPlan | None:
    """The exact plan that is predicted to be the fastest, found without a trial.

    Args:
        seconds: maximum seconds of the search.

    Returns:
        The plan; None if ``seconds`` is 0 or the rates of the links are unknown, and, with a warning, if the search
        fails.
    """
    if not seconds or not job.cluster.measured:
        return None
    _log.info("searching by prediction alone, for at most %g seconds", seconds)
    try:
        return rank_plans(job.workload, job.cluster, constants=constants, seconds=seconds)[0].plan
    except Exception as error:  # an addition to the comparison must not cost what the trials have found
        _log.warning("the search by prediction alone failed, so its plan is not compared: %s", reason(error))
        return None


def _corrected(record: TrialRecord, correction: DriftCorrection, own: str | None) -> TrialRecord:
    if record.seconds is None:
        return record
    seconds = correction.convert(None if own is None else record.run, record.number, record.seconds)
    return record.model_copy(update={"corrected": seconds})


def _best_of(record: TrialRecord, seconds: float, plan: SyncPlan) -> Best:
    return Best(
        number=record.number, origin=record.origin, seconds=seconds, builder=record.builder, plan=plan.to_dict()
    )


def _kinds(workload: Workload) -> dict[str, tuple[Any, ...]]:
    """The shapes and the kinds of gradients by name."""
    return {variable.name: (variable.shape, variable.dtype, variable.kind) for variable in workload.variables}
