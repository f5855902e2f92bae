"""Opponents of the plans: DDP with each of its settings, builders if they are no trials, and the reference plan."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, TypeVar

import optuna
from pydantic import ConfigDict, Field

from lightning_autosync.documents import PLAIN, Index, PositiveDuration, Record, checked, digest, parse_json
from lightning_autosync.errors import DocumentError
from lightning_autosync.interrupts import uninterrupted
from lightning_autosync.measure.drift import Drift
from lightning_autosync.measure.interleaving import StoppingRule, TrialMeasurement, measure_in_turns
from lightning_autosync.measure.reference import ReferencePlan
from lightning_autosync.measure.session import Contender, MeasurementSession
from lightning_autosync.plan import SyncPlan, compile_plan
from lightning_autosync.plan.builders import build
from lightning_autosync.plan.space import BUILDER, PlanSpace
from lightning_autosync.search.storages import StudyError, storage_errors
from lightning_autosync.search.tuning.job import TuningJob
from lightning_autosync.search.tuning.result import Opponent

OPPONENTS = "autosync:opponents"
"""User attribute of a study, followed by a digest of the run: the measured opponents as JSON text."""
REFERENCE = "autosync:reference-plan"
"""User attribute of a study: the reference plan, as JSON text. All sessions and processes use the same plan, since
times relative to different plans cannot be compared."""
Kind = Literal["ddp", "builder"]
_log = logging.getLogger(__name__)
_PLURAL: Mapping[Kind, str] = {"ddp": "ddp", "builder": "builders"}
_SHOWN: Mapping[Kind, str] = {"ddp": "settings of DDP", "builder": "builders' plans"}
_T = TypeVar("_T")


@dataclass(frozen=True)
class MeasuredOpponent:
    """The measurement of one opponent.

    Attributes:
        kind, name: kind and name of the opponent.
        batch: number of its batch, counted from 0.
        state: ``complete``, ``pruned`` or ``failed``.
        seconds: uncorrected seconds of a step; None without a step.
        why: why it failed or was pruned.
    """

    __pydantic_config__: ClassVar[ConfigDict] = PLAIN

    kind: Kind
    name: str
    batch: Index
    state: str
    seconds: PositiveDuration | None
    why: str | None


class _Stored(Record):
    """The attribute `OPPONENTS`."""

    measured: tuple[MeasuredOpponent, ...] = ()
    reference_by_batch: dict[int, PositiveDuration] = Field(default_factory=dict)


class Opponents:
    """Measures opponents before the trials and in the same way: in batches beside the reference plan, with pruning.

    The study stores the results for resumed runs.

    Args:
        session: live workers of the job.
        reference: reference plan, which shows the drift of the machine.
        study: study that stores the results.
        run: run of these opponents; None if the study has only one run.
    """

    def __init__(
        self,
        job: TuningJob,
        session: MeasurementSession,
        reference: ReferencePlan,
        study: optuna.Study,
        run: str | None,
    ) -> None:
        self._job = job
        self._session = session
        self._reference = reference
        self._study = study
        self._name = f"{OPPONENTS}:{digest(run)}"
        with storage_errors():
            text = study.user_attrs.get(self._name, "{}")
        where = f"study '{study.study_name}': {self._name}"
        stored = checked(_Stored, parse_json(text, where, StudyError), where, StudyError)
        self._measured, self._turns = list(stored.measured), dict(stored.reference_by_batch)

    def measure(self, builders: Mapping[str, SyncPlan]) -> None:
        """Measure every setting of DDP and the plans of ``builders``, except those measured already.

        Raises:
            DocumentError: none of one kind ran; the message gives the reasons.
            LaunchError: workers cannot be started.
        """
        job = self._job
        self._measure_new("ddp", {options.name: job.ddp_order(options) for options in job.settings.ddp.options()})
        if builders:
            self._measure_new("builder", {name: job.plan_order(plan) for name, plan in builders.items()})

    def fastest(self, kind: Kind, drift: Drift) -> list[Opponent]:
        """Complete opponents of a kind, fastest first, with seconds corrected to the trials with this ``drift``."""
        names = {options.name for options in self._job.settings.ddp.options()}  # an earlier session may have had others
        stretch = Drift(self._turns, drift.share)
        found = [
            Opponent(name=one.name, seconds=drift.convert(stretch, one.batch, one.seconds))
            for one in self._measured
            if one.kind == kind and one.state == "complete" and one.seconds is not None
            if kind != "ddp" or one.name in names
        ]
        return sorted(found, key=lambda one: one.seconds)

    def to_dict(self) -> dict[str, Any]:
        """All uncorrected measurements, and the reference beside each batch, as plain data."""
        return {
            "measured": [asdict(one) for one in self._measured],
            "reference_by_batch": {str(batch): seconds for batch, seconds in self._turns.items()},
        }

    def _measure_new(self, kind: Kind, orders: Mapping[str, Mapping[str, Any]]) -> None:
        known = self._known(kind, orders)
        new = {name: order for name, order in orders.items() if name not in known}
        for batch in announced_batches(_SHOWN[kind], new, self._job.settings.search.batch):
            self._play(kind, batch)
        found = [one for one in self._measured if one.kind == kind and one.name in orders]
        if not any(one.state == "complete" for one in found):
            reasons = "; ".join(f"{one.name}: {one.why}" for one in found if one.why)
            raise DocumentError(f"{_PLURAL[kind]}: all failed; {reasons}")

    def _known(self, kind: Kind, orders: Mapping[str, Any]) -> set[str]:
        """Names of opponents that need not be measured again: complete ones, and pruned ones if any is complete."""
        found = [one for one in self._measured if one.kind == kind and one.name in orders]
        ran = {one.name for one in found if one.state == "complete"}
        return ran | {one.name for one in found if one.state == "pruned"} if ran else ran

    def _play(self, kind: Kind, orders: Mapping[str, Mapping[str, Any]]) -> None:
        """Measure one batch. Results of other batches do not prune it, since the machine may have drifted since."""
        measurements = [TrialMeasurement(Contender(name, order)) for name, order in orders.items()]
        reference = self._reference.measurement()
        beside = [] if reference is None else [reference]
        trial = self._job.settings.trial
        measure_in_turns(self._session, [*beside, *measurements], StoppingRule(trial), trial.warm_up, _log_decision)
        if reference is not None and follow_reference(self._reference, self._study):
            reference = None  # of a plan that no other session uses
        self._keep(kind, measurements, reference)

    @uninterrupted()
    @storage_errors()
    def _keep(self, kind: Kind, measurements: Sequence[TrialMeasurement], reference: TrialMeasurement | None) -> None:
        """Store the measurements of a batch."""
        batch = 1 + max((*self._turns, *(one.batch for one in self._measured)), default=-1)
        if reference is not None and reference.state == "complete" and reference.seconds is not None:
            self._turns[batch] = reference.seconds
        names = {one.contender.name for one in measurements}
        others = [one for one in self._measured if one.kind != kind or one.name not in names]
        found = (MeasuredOpponent(kind, m.contender.name, batch, m.state, m.seconds, m.why) for m in measurements)
        self._measured = [*others, *found]
        self._study.set_user_attr(self._name, json.dumps(self.to_dict()))


def announced_batches(what: str, named: Mapping[str, _T], size: int) -> Iterator[dict[str, _T]]:
    """Contenders in batches. A log line before each batch says what is measured and how far the measurement is.

    Args:
        what: kind of contenders, in the plural.
        named: contenders by name.
        size: number of contenders in a batch.
    """
    names = list(named)
    for begin in range(0, len(names), size):
        batch = names[begin : begin + size]
        _log.info("measuring %s, %d to %d of %d: %s", what, begin + 1, begin + len(batch), len(names), ", ".join(batch))
        yield {name: named[name] for name in batch}


def _log_decision(measurement: TrialMeasurement) -> None:
    if measurement.is_reference or measurement.seconds is None:  # a failure is logged when it happens
        return
    why = f", {measurement.state}: {measurement.why}" if measurement.why else ""
    _log.info("%s: %.1f ms a step%s", measurement.contender.name, 1e3 * measurement.seconds, why)


def builder_plans(job: TuningJob) -> dict[str, SyncPlan]:
    """The plans of the builders that fit the cluster, by name."""
    space = PlanSpace(job.workload, job.cluster)
    names = [str(point[BUILDER]) for point in space.baselines()]
    plans = {name: build(name, job.workload, job.cluster) for name in names}
    for plan in plans.values():
        compile_plan(plan, job.workload, job.cluster)
    return plans


def settle_reference(reference: ReferencePlan, study: optuna.Study, plans: Sequence[SyncPlan]) -> None:
    """Use the study's reference plan. If it has none, use the first of ``plans`` that runs, and store it.

    Raises:
        LaunchError: workers cannot be started.
        StorageError: the study's storage does not answer.
    """
    if _stored_reference(study) is None and (plan := reference.take_first_that_runs(plans)) is not None:
        _store_reference(study, plan)
    follow_reference(reference, study)


def follow_reference(reference: ReferencePlan, study: optuna.Study) -> bool:
    """Use the study's reference plan from now on; returns whether it is another one than before.

    If two processes store one at the same moment, the later one counts. So the other process must look again once that
    moment is over, which it is after a batch.

    Raises:
        StorageError: the study's storage does not answer.
    """
    stored = _stored_reference(study)
    if stored is None or (reference.plan is not None and reference.plan.fingerprint == stored.fingerprint):
        return False
    reference.take(stored)
    return True


@uninterrupted()
@storage_errors()
def _stored_reference(study: optuna.Study) -> SyncPlan | None:
    found, where = study.user_attrs.get(REFERENCE), f"study '{study.study_name}': {REFERENCE}"
    return None if found is None else SyncPlan.from_dict(parse_json(found, where, StudyError), where)


@uninterrupted()
@storage_errors()
def _store_reference(study: optuna.Study, plan: SyncPlan) -> None:
    """Store the reference plan, unless another process was faster."""
    if _stored_reference(study) is None:
        study.set_user_attr(REFERENCE, json.dumps(plan.to_dict()))
