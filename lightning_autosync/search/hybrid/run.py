"""A tuning run that may split operators: search by prediction, measure the best few live, compare, keep the fastest.

The opponents are DDP with each of its settings, the builders' synchronization plans on the ordinary engine, and
Megatron's alternation of splits. All are trials of one Optuna study.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import torch

from lightning_autosync.documents import bytes_text, digest, identity, seconds_text
from lightning_autosync.errors import AutoSyncError, DocumentError, PlanError, TuningError
from lightning_autosync.hybrid.capture import capture
from lightning_autosync.hybrid.cost import StepSettings
from lightning_autosync.hybrid.graph import Graph
from lightning_autosync.hybrid.prediction import predict
from lightning_autosync.hybrid.rates import HybridRates
from lightning_autosync.hybrid.search import Found, HybridCandidate, search
from lightning_autosync.interrupts import uninterrupted
from lightning_autosync.measure import replica_calls
from lightning_autosync.measure.bench.output import EXACT
from lightning_autosync.measure.hybrid.calibration import calibrate
from lightning_autosync.measure.interleaving import StoppingRule, TrialMeasurement, measure_in_turns
from lightning_autosync.measure.progress import Report, silent
from lightning_autosync.measure.session import Contender, ContenderError, MeasurementSession, reason
from lightning_autosync.search.hybrid.result import HybridTrial, HybridTuningResult, Origin, fastest_plan, plan_of
from lightning_autosync.search.hybrid.trials import HybridTrials
from lightning_autosync.search.passwords import without_passwords_in
from lightning_autosync.search.storages import (
    STEP_SECONDS,
    StorageError,
    StudyError,
    name_metrics,
    open_plan_storage,
    storage_errors,
)
from lightning_autosync.search.tuning.comparison import AnyPlan, compare
from lightning_autosync.search.tuning.job import TuningJob
from lightning_autosync.search.tuning.opponents import announced_batches, builder_plans
from lightning_autosync.search.tuning.settings import TuningSettings

RATES = "rates.yaml"
JOURNAL = "study.journal"
ABOUT = "autosync:hybrid"
"""User attribute of a study: a digest of graph, cluster and model."""
RIVALS = 2
"""Maximum numbers of DDP settings, and of builders' plans, in the final comparison."""
_SGD = StepSettings(slots=0)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Entry:
    """A contender to measure."""

    name: str
    origin: Origin
    place: int
    order: Mapping[str, Any]
    plan: AnyPlan | None = None
    candidate: HybridCandidate | None = None
    bytes: float | None = None


@dataclass(frozen=True)
class HybridTuningOutcome:
    """A finished run: the tuned job and the result."""

    job: TuningJob
    result: HybridTuningResult

    @property
    def plan(self) -> AnyPlan | None:
        """The best plan; None if no plan has a time."""
        return self.result.plan

    def __float__(self) -> float:
        return float(self.result)


class HybridTuningRun:
    """One run.

    Args:
        settings: settings with ``parallel.kind`` ``hybrid``.
        directory: directory of the run; that of an earlier run resumes it.
        saving: stack that blocks further interrupts after a first Ctrl-C, until the caller has written the result.
        report: told of each trial.

    Raises:
        DocumentError: the model, the cluster or a file is wrong.
    """

    def __init__(self, settings: TuningSettings, directory: Path, saving: ExitStack, report: Report = silent) -> None:
        self._saving = saving
        self._settings = settings
        self._report = report
        self._done = self._total = 0
        self._directory = directory
        self._job = TuningJob.of(settings)
        if settings.is_paced:
            raise DocumentError(
                "parallel: hybrid needs a model with operators to split; "
                f"the computation of '{settings.model.kind}' is paced"
            )
        self._job.cluster.require_measured()
        self._graph = self._captured()
        self._search_seconds = 0.0

    def run(self) -> HybridTuningOutcome:
        """Run the search and the trials.

        A Ctrl-C during the trials or the final comparison, or an error after some plan has a time, ends the run early,
        as the result states. If the study's storage stops answering, the result has the trials that were read from it
        last.

        Raises:
            PlanError: no plan fits into the memory.
            TuningError: no plan ran, or no DDP, before any plan has a time.
            LaunchError: workers cannot be started, before any plan has a time.
            StudyError: the study is of another job, or cannot be opened.
            StorageError: the study's storage does not answer, before any plan has a time.
        """
        final, interrupted, failure = None, False, None
        trials = self._open()
        with self._job.session() as session:
            rates = self._rates(session)
            entries = self._entries(rates)
            try:
                self._measure(session, trials, entries)
                final = self._compare(session, self._allowed(trials))
            except KeyboardInterrupt:
                # A second Ctrl-C must not lose the result before the caller has written it.
                self._saving.enter_context(uninterrupted())
                _log.warning("interrupted")
                interrupted = True
            except AutoSyncError as error:
                if isinstance(error, StorageError):
                    trials.freeze()  # the reads below would fail as well
                if fastest_plan(self._allowed(trials)) is None:
                    raise
                failure = reason(error)
        result = HybridTuningResult(
            settings=without_passwords_in(self._settings.model_dump(mode="json")),
            cluster=self._job.cluster.to_dict(),
            rates=rates.to_dict(),
            model=self._settings.model.title,
            weight_bytes=self._graph.weight_bytes,
            search_seconds=self._search_seconds,
            notes=self._graph.notes,
            trials=tuple(self._allowed(trials)),
            final=final,
            winner=None if final is None else final["winner"],
            interrupted=interrupted,
            failure=failure,
        )
        return HybridTuningOutcome(self._job, result)

    def _captured(self) -> Graph:
        model = self._settings.model
        with torch.device("meta"):
            module = model.module()
        return capture(module, *model.batches(0)[0])

    def _rates(self, session: MeasurementSession) -> HybridRates:
        """The rates of the given file, those that this run saved earlier, or new measurements."""
        path, given = self._directory / RATES, self._settings.parallel.rates or self._settings.transfer.rates
        if given is not None or path.exists():
            return HybridRates.load(given or path)
        rates = calibrate(session, self._job.cluster)
        rates.save(path)
        return rates

    def _entries(self, rates: HybridRates) -> list[_Entry]:
        job, chosen = self._job, self._settings.parallel
        begin = time.perf_counter()
        found = search(self._graph, job.cluster, rates, memory=chosen.memory, settings=_SGD, keep=chosen.trials + 1)
        self._search_seconds = time.perf_counter() - begin
        options = enumerate(self._settings.ddp.options())
        entries = [_Entry(one.name, "ddp", place, job.ddp_order(one)) for place, one in options]
        split = self._split(found, rates)
        if self._fits(found.data_parallel.memory):
            for place, (name, plan) in enumerate(builder_plans(job).items()):
                entries.append(_Entry(name, "builder", place, job.plan_order(plan), plan, found.data_parallel))
        else:
            limit = bytes_text(chosen.memory or 0.0)
            if not split:
                least = bytes_text(found.best.memory)
                raise PlanError(f"parallel.memory: no plan fits into {limit} per rank; the smallest plan needs {least}")
            _log.info("data parallelism does not fit into %s per rank", limit)
            entries = entries[:1]  # whose gradients the others are compared with
        return entries + split

    def _fits(self, memory: float | None) -> bool:
        """Whether so many bytes on a rank are allowed; None is an unknown number."""
        limit = self._settings.parallel.memory
        return limit is None or (memory is not None and memory <= limit)

    def _split(self, found: Found, rates: HybridRates) -> list[_Entry]:
        """Entries of the plans that split operators and fit into memory."""
        plans: dict[str, tuple[str, Origin, HybridCandidate]] = {}
        if found.megatron is not None and self._fits(found.megatron.memory):
            plans[found.megatron.plan.fingerprint] = "megatron", "megatron", found.megatron
        for candidate in found.plans:
            if candidate.plan.is_data_parallel or not self._fits(candidate.memory):
                continue
            if len(plans) <= self._settings.parallel.trials:
                name = f"split_{candidate.plan.fingerprint[:6]}"
                plans.setdefault(candidate.plan.fingerprint, (name, "search", candidate))
        entries = []
        for place, (name, origin, candidate) in enumerate(plans.values()):
            sent = predict(candidate.plan, self._graph, self._job.cluster, rates, _SGD).bytes
            order = self._job.plan_order(candidate.plan)
            entries.append(_Entry(name, origin, place, order, candidate.plan, candidate, sent))
        return entries

    def _open(self) -> HybridTrials:
        return HybridTrials(self._study(), identity(self._directory), self._settings.study.storage is None)

    @storage_errors()
    def _study(self) -> optuna.Study:
        storage = self._settings.study.storage or str(self._directory / JOURNAL)
        study = optuna.create_study(
            storage=open_plan_storage(storage), study_name=self._settings.study.name, load_if_exists=True
        )
        about = digest(
            [self._graph.fingerprint, self._job.cluster.fingerprint, self._settings.model.model_dump(mode="json")]
        )
        if study.user_attrs.get(ABOUT, about) != about or (ABOUT not in study.user_attrs and study.get_trials()):
            raise StudyError(f"study '{study.study_name}' belongs to another job; choose another study.name or storage")
        self._job.claim(study)
        study.set_user_attr(ABOUT, about)
        name_metrics(study, [STEP_SECONDS])
        return study

    def _allowed(self, trials: HybridTrials) -> list[HybridTrial]:
        """The finished trials whose plans fit into memory; an earlier session may have had a higher limit."""
        return [one for one in trials.records() if one.origin == "ddp" or self._fits(one.memory)]

    def _measure(self, session: MeasurementSession, trials: HybridTrials, entries: Sequence[_Entry]) -> None:
        known = {trial.name for trial in trials.records() if trial.state != "failed"}
        new = {entry.name: entry for entry in entries if entry.name not in known}
        reference, best = entries[0], None
        self._done, self._total = 0, len(new)
        for batch in announced_batches("DDP and plans", new, self._settings.search.batch):
            best = self._play(session, trials, batch, reference, best)
        records = trials.records()
        if not any(trial.seconds is not None for trial in records):
            reasons = {trial.why for trial in records if trial.why}
            raise TuningError(f"every plan and DDP setting failed: {'; '.join(sorted(reasons))}")

    def _play(
        self,
        session: MeasurementSession,
        trials: HybridTrials,
        batch: Mapping[str, _Entry],
        reference: _Entry,
        best: float | None,
    ) -> float | None:
        """Measure a batch and tell the study each time; returns the seconds of the fastest so far."""
        deviations = self._deviations(session, reference, list(batch.values()))

        def tell(measurement: TrialMeasurement) -> None:
            name = measurement.contender.name
            self._tell(trials, batch[name], measurement, deviations.get(name))

        measurements = []
        for name, entry in batch.items():
            measurement = TrialMeasurement(Contender(name, entry.order), is_reference=entry is reference)
            deviation = deviations.get(name, 0.0)
            if isinstance(deviation, str) or not deviation <= EXACT:
                why = deviation if isinstance(deviation, str) else f"its gradients deviate by {deviation:.1e}"
                measurement.end("failed", why)
                tell(measurement)
            measurements.append(measurement)
        rule = StoppingRule(self._settings.trial, best)
        measure_in_turns(session, measurements, rule, self._settings.trial.warm_up, tell)
        return rule.best

    def _deviations(
        self, session: MeasurementSession, reference: _Entry, batch: Sequence[_Entry]
    ) -> dict[str, float | str]:
        """Relative deviations of gradients of split plans from DDP's, or why they are unknown.

        The caller rejects plans with other gradients, since they would train another model.
        """
        found: dict[str, float | str] = {}
        against = Contender("gradients", reference.order)
        for entry in batch:
            if entry.origin not in ("search", "megatron"):
                continue
            tried = Contender(entry.name, entry.order)
            try:
                if not session.live(against):
                    session.call(against, replica_calls.keep_gradients)
                found[entry.name] = max(session.call(tried, replica_calls.deviation, reference="gradients"))
            except ContenderError as error:
                found[entry.name] = reason(error.failure)
            session.take_down(tried)
        session.take_down(against)
        return found

    def _tell(
        self, trials: HybridTrials, entry: _Entry, measurement: TrialMeasurement, deviation: float | str | None
    ) -> None:
        candidate = entry.candidate
        record = HybridTrial(
            number=0,  # not known yet
            name=entry.name,
            origin=entry.origin,
            state=measurement.state,
            seconds=measurement.seconds if measurement.state != "failed" else None,
            # The cost model prices data parallelism as an all-reduce, whatever a builder's plan is.
            predicted=None if candidate is None or entry.origin == "builder" else candidate.step_seconds,
            memory=None if candidate is None else candidate.memory,
            bytes=entry.bytes,
            deviation=deviation if isinstance(deviation, float) else None,
            why=measurement.why,
            plan=None if entry.plan is None else entry.plan.to_dict(),
        )
        trials.add(record, entry.place)
        told = "-" if record.seconds is None else seconds_text(record.seconds)
        said = "" if record.predicted is None else f", predicted {seconds_text(record.predicted)}"
        _log.info("%s: %s %s%s%s", entry.name, record.state, told, said, f" ({record.why})" if record.why else "")
        self._done += 1
        self._report(self._done, self._total, f"{entry.name}: {record.state} {told}")

    def _compare(self, session: MeasurementSession, trials: Sequence[HybridTrial]) -> dict[str, Any]:
        """The final comparison, in which the best of each kind take turns, as plain data."""
        fastest = sorted((one for one in trials if one.seconds is not None), key=lambda one: one.seconds or 0.0)
        plans: dict[str, AnyPlan] = {}
        for origin, most in (("builder", RIVALS), ("megatron", 1), ("search", self._settings.finalists)):
            for trial in [one for one in fastest if one.origin == origin][:most]:
                plan = plan_of(trial)
                if plan is not None:
                    plans[trial.name] = plan
        names = {options.name for options in self._settings.ddp.options()}  # an earlier session may have had others
        rivals = [one.name for one in fastest if one.origin == "ddp" and one.name in names][:RIVALS]
        if not plans or not rivals:
            raise TuningError(f"no {'DDP setting' if plans else 'plan'} was measured")
        return compare(self._job, session, plans, rivals, self._directory)
