"""What a plan has to beat: DDP with each of its settings, and builders where they are no trials."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, ClassVar, Literal

import optuna
from pydantic import ConfigDict, Field

from lightning_autosync.documents import PLAIN, Index, Record, Taken, checked, digest, parse_json
from lightning_autosync.errors import DocumentError
from lightning_autosync.measure.drift import Drift
from lightning_autosync.measure.interleaving import StoppingRule, TrialMeasurement, measure_in_turns
from lightning_autosync.measure.reference import ReferencePlan
from lightning_autosync.measure.session import Contender, MeasurementSession
from lightning_autosync.plan import SyncPlan, compile_plan
from lightning_autosync.plan.builders import build
from lightning_autosync.plan.space import BUILDER, PlanSpace
from lightning_autosync.search.storages import StudyError, storage_errors
from lightning_autosync.search.tuning.interruptions import uninterrupted
from lightning_autosync.search.tuning.job import Job

OPPONENTS = "autosync:opponents"
"""User attribute of a study, with a digest of the run whose opponents it holds behind it: JSON text."""
Kind = Literal["ddp", "builder"]
_log = logging.getLogger(__name__)
_PLURAL: Mapping[Kind, str] = {"ddp": "ddp", "builder": "builders"}


@dataclass(frozen=True)
class Opponent:
    """One of them; ``seconds`` are those of a step, on the footing of the trials."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Standing:
    """One of them as measured.

    Attributes:
        kind, name: which one.
        batch: number of the batch that it was measured in, from 0 on.
        state: as of a trial: ``complete``, ``pruned`` or ``failed``.
        seconds: of a step, as they were; None without one.
        why: it failed or was pruned.
    """

    __pydantic_config__: ClassVar[ConfigDict] = PLAIN

    kind: Kind
    name: str
    batch: Index
    state: str
    seconds: Taken | None
    why: str | None


class _Kept(Record):
    """What a study keeps of them."""

    measured: tuple[Standing, ...] = ()
    reference_by_batch: dict[int, Taken] = Field(default_factory=dict)


class Opponents:
    """They are measured before the trials, and as trials are: in batches beside the reference, losers only briefly.

    The study keeps what was found, so that a run that goes on has it.

    Args:
        job: what is tuned.
        session: its live workers.
        reference: that shows the drift of the machine.
        study: that keeps them.
        run: whose opponents these are; None where the study is of one run only.
    """

    def __init__(
        self, job: Job, session: MeasurementSession, reference: ReferencePlan, study: optuna.Study, run: str | None
    ) -> None:
        self._job = job
        self._session = session
        self._reference = reference
        self._study = study
        self._name = f"{OPPONENTS}:{digest(run)}"
        with storage_errors():
            text = study.user_attrs.get(self._name, "{}")
        where = f"study '{study.study_name}': {self._name}"
        kept = checked(_Kept, parse_json(text, where, StudyError), where, StudyError)
        self._standings, self._turns = list(kept.measured), dict(kept.reference_by_batch)

    def measure(self, builders: Mapping[str, SyncPlan]) -> None:
        """Measure every setting of DDP and the plans of ``builders``, but for those that are known already.

        Raises:
            DocumentError: none of them ran; the message says why.
            LaunchError: workers cannot be started.
        """
        job = self._job
        self._measure("ddp", {options.name: job.ddp_order(options) for options in job.settings.ddp.options()})
        if builders:
            self._measure("builder", {name: job.plan_order(plan) for name, plan in builders.items()})

    def fastest(self, kind: Kind, drift: Drift) -> list[Opponent]:
        """Those that ran to their end, the fastest first, on the footing of the trials whose ``drift`` this is."""
        names = {options.name for options in self._job.settings.ddp.options()}  # others may be of an earlier session
        stretch = Drift(self._turns, drift.share)
        found = [
            Opponent(one.name, drift.convert(stretch, one.batch, one.seconds))
            for one in self._standings
            if one.kind == kind and one.state == "complete" and one.seconds is not None
            if kind != "ddp" or one.name in names
        ]
        return sorted(found, key=lambda one: one.seconds)

    def to_dict(self) -> dict[str, Any]:
        """What was measured, as it was, and the reference beside each batch."""
        return {
            "measured": [asdict(one) for one in self._standings],
            "reference_by_batch": {str(batch): seconds for batch, seconds in self._turns.items()},
        }

    def _measure(self, kind: Kind, orders: Mapping[str, Mapping[str, Any]]) -> None:
        known = self._known(kind, orders)
        names = [name for name in orders if name not in known]
        if names:
            _log.info("measuring %s before the trials: %s", _PLURAL[kind], ", ".join(names))
        left = iter(names)
        while batch := list(islice(left, self._job.settings.search.batch)):
            self._play(kind, {name: orders[name] for name in batch})
        found = [one for one in self._standings if one.kind == kind and one.name in orders]
        if not any(one.state == "complete" for one in found):
            reasons = "; ".join(f"{one.name}: {one.why}" for one in found if one.why)
            raise DocumentError(f"{_PLURAL[kind]}: none of them ran; {reasons}")

    def _known(self, kind: Kind, orders: Mapping[str, Any]) -> set[str]:
        """Names of those that need not be measured again; who was given up has to be, if none that is left ran."""
        found = [one for one in self._standings if one.kind == kind and one.name in orders]
        ran = {one.name for one in found if one.state == "complete"}
        return ran | {one.name for one in found if one.state == "pruned"} if ran else ran

    def _play(self, kind: Kind, orders: Mapping[str, Mapping[str, Any]]) -> None:
        """One batch. What is known of other batches gives up nobody here: the machine may have drifted since."""
        measurements = [TrialMeasurement(Contender(name, order)) for name, order in orders.items()]
        reference = self._reference.measurement()
        beside = [] if reference is None else [reference]
        trial = self._job.settings.trial
        measure_in_turns(self._session, [*beside, *measurements], StoppingRule(trial), trial.warm_up)
        self._keep(kind, measurements, reference)

    @uninterrupted()
    @storage_errors()
    def _keep(self, kind: Kind, measurements: Sequence[TrialMeasurement], reference: TrialMeasurement | None) -> None:
        """Take in what a batch gave."""
        batch = 1 + max((*self._turns, *(one.batch for one in self._standings)), default=-1)
        if reference is not None and reference.state == "complete" and reference.seconds is not None:
            self._turns[batch] = reference.seconds
        names = {one.contender.name for one in measurements}
        before = [one for one in self._standings if one.kind != kind or one.name not in names]
        self._standings = [*before, *(_standing(kind, batch, one) for one in measurements)]
        self._study.set_user_attr(self._name, json.dumps(self.to_dict()))


def builder_plans(job: Job) -> dict[str, SyncPlan]:
    """The plans of the builders that fit the cluster, by name."""
    space = PlanSpace(job.workload, job.cluster)
    names = [str(point[BUILDER]) for point in space.baselines()]
    plans = {name: build(name, job.workload, job.cluster) for name in names}
    for plan in plans.values():
        compile_plan(plan, job.workload, job.cluster)
    return plans


def _standing(kind: Kind, batch: int, measurement: TrialMeasurement) -> Standing:
    return Standing(kind, measurement.contender.name, batch, measurement.state, measurement.seconds, measurement.why)
