"""A run from its settings to its outcome: open the study, measure opponents, spend the budget, compare."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_autosync.documents import digest, identity
from lightning_autosync.errors import AutoSyncError
from lightning_autosync.learned import ReplayEstimator
from lightning_autosync.measure.reference import ReferencePlan
from lightning_autosync.measure.session import MeasurementSession, reason
from lightning_autosync.plan import SyncPlan
from lightning_autosync.plan.builders import build
from lightning_autosync.plan.space import PlanSpace
from lightning_autosync.search import storages, studies, trial_attributes
from lightning_autosync.search.tuning.buckets import BucketSpace
from lightning_autosync.search.tuning.errors import TuningError
from lightning_autosync.search.tuning.final import Final
from lightning_autosync.search.tuning.interruptions import uninterrupted
from lightning_autosync.search.tuning.job import Job
from lightning_autosync.search.tuning.last_comparison import compare
from lightning_autosync.search.tuning.opponents import Opponent, Opponents, builder_plans
from lightning_autosync.search.tuning.reference import settle_reference
from lightning_autosync.search.tuning.result import Best, Outcome, Pace
from lightning_autosync.search.tuning.samplers import Space, make_sampler
from lightning_autosync.search.tuning.settings import SearchSettings, Settings
from lightning_autosync.search.tuning.sources import Sources
from lightning_autosync.search.tuning.trials import Record, Trials, drift_of, ranked
from lightning_autosync.search.tuning.tuner import Tuner

JOURNAL = "study.journal"
RIVALS = 3
"""Settings of DDP that come to the last comparison, whose choosing rounds decide which of them is the opponent."""
_log = logging.getLogger(__name__)


class Run:
    """One tuning run.

    Args:
        settings: what is asked.
        directory: of the run; with the same one, a run goes on.
        saving: after an interruption it holds back further ones, until the caller has written what was found.

    Raises:
        DocumentError: the model, the cluster, the simulator or a source of transfer is wrong.
    """

    def __init__(self, settings: Settings, directory: Path, saving: ExitStack) -> None:
        self._saving = saving
        self._settings = settings
        self._directory = directory
        self._storage = settings.study.storage or str(directory / JOURNAL)
        self._job = Job.of(settings)
        self._sources = Sources.of(self._job)
        self._begin = time.perf_counter()

    def run(self) -> Outcome:
        """Tune.

        An interruption, or an error after some trials came to a time, ends the search early, and the outcome says so;
        where the study's storage does not answer any more, it tells of what was read from it last.
        With a budget that is spent already, only the last comparison is made.

        Raises:
            StudyError: the study is of another space, or cannot be opened.
            StorageError: the study's storage does not answer, before any trial came to a time.
            TuningError: no DDP ran, or too many trials failed, before any trial came to a time.
            LaunchError: workers cannot be started; likewise.
        """
        with self._job.session() as session:
            self._job = self._with_times(session)
            trials = self._open(self._space())
            reference = ReferencePlan(session, self._job.plan_order, self._settings.trial.warm_up)
            opponents = Opponents(self._job, session, reference, trials.study, trials.own)
            replay = ReplayEstimator(self._sources.constants) if self._job.cluster.measured else None
            tuner = Tuner(self._job, session, trials, opponents, reference, replay)
            final, interrupted, failure = None, False, None
            try:
                builders = builder_plans(self._job)
                settle_reference(reference, trials.study, self._by_price(builders))
                opponents.measure({} if self._settings.search.tries_builders else builders)
                tuner.run()
                final = self._compare(session, trials, opponents)
            except KeyboardInterrupt:
                self._saving.enter_context(uninterrupted())
                _log.warning("interrupted")
                interrupted = True
            except AutoSyncError as error:
                if isinstance(error, storages.StorageError):
                    trials.lose()
                if not ranked(trials.records(), trials.own):
                    raise
                failure = reason(error)
            pace = Pace(tuner.trials_per_minute, trials.proposals, time.perf_counter() - self._begin, session.restarts)
        records = trials.records()
        return Outcome(
            job=self._job,
            storage=self._storage,
            records=records,
            ddp=next(iter(opponents.fastest("ddp", drift_of(records, trials.own))), None),
            builder=self._best_builder(trials, opponents),
            best=self._best(trials, final),
            final=final,
            pace=pace,
            interrupted=interrupted,
            failure=failure,
            run=trials.own,
            measured=opponents.to_dict(),
        )

    def _with_times(self, session: MeasurementSession) -> Job:
        """The job with the times of its model: those that the study has, or measured now."""
        if not self._job.measured_model:
            return self._job
        with suppress(storages.StudyError):
            known = studies.workload_of(studies.load_study(self._storage, self._settings.study.name))
            if known.variables_fingerprint == self._job.workload.variables_fingerprint:
                return replace(self._job, workload=known)
        return self._job.profiled(session)

    def _space(self) -> Space:
        if self._settings.search.sampler == "horovod":
            return BucketSpace(self._job.workload, self._job.cluster)
        return PlanSpace(self._job.workload, self._job.cluster, self._settings.semantics)

    def _open(self, space: Space) -> Trials:
        settings = self._settings
        described: Any = space  # a space of buckets has all that a study asks of one of plans
        # Its own default is Horovod's baseline, and no builder's plan.
        first = space.baselines() if settings.search.tries_builders or isinstance(space, BucketSpace) else []
        study = studies.open_study(self._storage, settings.study.name, described, first=first)
        if isinstance(space, PlanSpace):
            space = studies.space_of(study)  # which keeps the domains that a study began with
            first = [point for point in first if space.has(point)]
        self._job.hold(study)
        alone = settings.study.storage is None
        trials = Trials(study, space, settings.search.sampler, identity(self._directory), alone)
        study.sampler = make_sampler(self._seeded(trials), space, self._sources)
        if left := trials.settle():
            _log.info("%d trials of an interrupted session have failed; their plans may be tried again", left)
        studies.enqueue(study, first, trial_attributes.BASELINE)  # once more those that were interrupted
        return trials

    def _seeded(self, trials: Trials) -> SearchSettings:
        """The settings of the search with a seed of this session's own: one that goes on, or has others beside it, must
        not draw again what was drawn before."""
        search, finished = self._settings.search, len(trials.records())
        if search.seed is None or (trials.alone and not finished):
            return search
        own = int(digest([search.seed, trials.run, finished]), 16) % 2**32
        return search.model_copy(update={"seed": own})

    def _by_price(self, builders: Mapping[str, SyncPlan]) -> list[SyncPlan]:
        """Builders' plans, those first that should be fastest, where anything is known of that."""
        plans = list(builders.values())
        if self._sources.estimator is None:
            return plans
        seconds = self._sources.estimator.estimate(self._job.workload, self._job.cluster, plans).seconds
        return [plans[place] for place in seconds.argsort(kind="stable")]

    def _best_builder(self, trials: Trials, opponents: Opponents) -> Opponent | None:
        """Of the trials that stand for a builder's plan, or of those measured beside the study.

        Those that were given up count, too: a plan of the search in the same batch may have been faster than all.
        """
        records = trials.records()
        if not self._settings.search.tries_builders:
            return next(iter(opponents.fastest("builder", drift_of(records, trials.own))), None)
        fastest = ranked(records, trials.own, states=("complete", "pruned"))
        found = [(record.builder, seconds) for record, seconds in fastest if record.builder is not None]
        return Opponent(*found[0]) if found else None

    def _compare(self, session: MeasurementSession, trials: Trials, opponents: Opponents) -> Final:
        records = trials.records()
        builder = self._best_builder(trials, opponents)
        plans = self._finalists(trials, builder)
        if not plans:
            raise TuningError(f"none of {len(records)} trials came to a time; the last: {_last_error(records)}")
        rivals = [one.name for one in opponents.fastest("ddp", drift_of(records, trials.own))[:RIVALS]]
        _log.info("%d plans and %s in twice %d rounds", len(plans), ", ".join(rivals), self._settings.rounds)
        return compare(self._job, session, plans, rivals, self._directory)

    def _finalists(self, trials: Trials, builder: Opponent | None) -> dict[str, SyncPlan]:
        """The best builder's plan and the fastest others, builders' among them or not, by name."""
        plans = {}
        if builder is not None:
            plans[builder.name] = build(builder.name, self._job.workload, self._job.cluster)
        known = {plan.fingerprint for plan in plans.values()}
        fastest = [record for record, _ in ranked(trials.records(), trials.own) if record.plan not in known]
        for record in fastest[: self._settings.finalists]:
            plans[record.builder or f"trial_{record.number}"] = trials.plan_of(record.number)
        return plans

    def _best(self, trials: Trials, final: Final | None) -> Best | None:
        """The winner of the last comparison, or else the fastest trial."""
        records = trials.records()
        if final is None:
            fastest = ranked(records, trials.own)
            return _best_of(*fastest[0], trials) if fastest else None
        plan = final.plans[final.winner]
        tried_ones = ranked(records, trials.own, states=("complete", "pruned"))
        found = [record for record, _ in tried_ones if record.plan == plan.fingerprint]
        if found:
            return replace(_best_of(found[0], final.seconds, trials), plan=plan)
        return Best(None, "baseline", final.seconds, plan, final.winner)


def _best_of(record: Record, seconds: float, trials: Trials) -> Best:
    return Best(record.number, record.origin, seconds, trials.plan_of(record.number), record.builder)


def _last_error(records: Sequence[Record]) -> str:
    return records[-1].error or "no reason" if records else "there was none"
