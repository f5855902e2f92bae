"""The job to tune: model, cluster and workload, and prior knowledge before its first trial."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import optuna

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import checked, parse_json, shown
from lightning_autosync.errors import DocumentError
from lightning_autosync.hybrid import HybridPlan
from lightning_autosync.learned import Estimator
from lightning_autosync.learned.dataset import Sample
from lightning_autosync.learned.pretrained import PRETRAINED
from lightning_autosync.measure import replica_calls
from lightning_autosync.measure.bench import settings as bench
from lightning_autosync.measure.bench.preparation import prepare
from lightning_autosync.measure.bench.settings import DDPOptions
from lightning_autosync.measure.hosts import job_hosts
from lightning_autosync.measure.session import MeasurementSession
from lightning_autosync.plan import SyncPlan
from lightning_autosync.replay import Constants
from lightning_autosync.search.storages import StudyError, storage_errors
from lightning_autosync.search.transfer import load_transfer
from lightning_autosync.search.tuning.settings import TuningSettings
from lightning_autosync.workload import Workload

JOB = "autosync:job"
"""User attribute of a study: what its times depend on, besides workload and cluster, as JSON text."""
_STEPS_ARE = "means of the ranks"
"""The steps of a study's trials."""
_Facts = dict[str, Any]


@dataclass(frozen=True)
class TuningJob:
    """The job to tune.

    Attributes:
        cluster: the machines, scaled and in the chosen rank order.
        workload: variables of the model, with row-sparse gradients of those tables of which jobs send rows.
    """

    settings: TuningSettings
    cluster: ClusterSpec
    workload: Workload

    @classmethod
    def of(cls, settings: TuningSettings) -> TuningJob:
        """The job of the settings.

        Raises:
            DocumentError: the model, the cluster or a further contender is wrong.
        """
        prepared = prepare(settings)
        if prepared.cluster.world_size < 2:
            raise DocumentError("ranks: one rank has nothing to synchronize; a search needs two or more")
        return cls(settings, prepared.cluster, prepared.workload)

    def session(self) -> MeasurementSession:
        """A session of workers for the job."""
        chosen = self.settings
        return MeasurementSession(self.cluster, chosen.launch, chosen.timeout, chosen.scheduling, chosen.within_job)

    def profiled(self, session: MeasurementSession) -> TuningJob:
        """The job with times of its slowest rank, measured while all ranks compute."""
        found = session.run(replica_calls.profile, model=self.settings.model.model_dump())
        workloads = [Workload.from_dict(data, "profile") for data in found]
        return replace(self, workload=max(workloads, key=lambda one: one.forward_time + one.backward_time))

    @storage_errors()
    def claim(self, study: optuna.Study) -> None:
        """Check that a study's times are comparable with this job's, and store in the study what they depend on.

        Raises:
            StudyError: the study has another model, launch or scheduling policy of workers.
            StorageError: the study's storage does not answer.
        """
        settings = self.settings
        model = settings.model.model_dump(mode="json")
        own = {
            "model": model,
            "launch": settings.launch_kind,
            "scheduling": settings.scheduling,
            "steps": _STEPS_ARE,
        }
        where = f"study '{study.study_name}': {JOB}"
        kept: Any = checked(_Facts, parse_json(study.user_attrs.get(JOB, "{}"), where, StudyError), where, StudyError)
        if kept and "steps" not in kept:
            raise StudyError(
                f"study '{study.study_name}': an earlier version measured it, whose step times are those of the "
                "slowest rank, not means of the ranks; choose another study.name or hydra.run.dir"
            )
        for name, value in own.items():
            if name in kept and kept[name] != value:
                raise StudyError(
                    f"{name}: study '{study.study_name}' was measured with {shown(kept[name])}, not {value!r}; use "
                    "the former, or choose another study.name or hydra.run.dir"
                )
        study.set_user_attr(JOB, json.dumps(own))

    def plan_order(self, plan: SyncPlan | HybridPlan) -> dict[str, Any]:
        """Arguments of `lightning_autosync.measure.replica_calls.set_up` for a plan, without the name."""
        if isinstance(plan, HybridPlan):
            return {**self._order(), "hybrid": plan.to_dict()}
        return {**self._order(), "plan": plan.to_dict(), "workload": self.workload.to_dict()}

    def ddp_order(self, options: DDPOptions) -> dict[str, Any]:
        """The same for DDP."""
        return {**self._order(), "ddp": options.model_dump()}

    def _order(self) -> dict[str, Any]:
        model, timeout = self.settings.model.model_dump(), self.settings.exchange_timeout
        return {"model": model, "sparse": False, "cluster": self.cluster.to_dict(), "timeout": timeout}

    def bench_settings(self, **changes: Any) -> bench.BenchSettings:
        """The settings of a bench of this job, with some fields changed."""
        kept = {name: getattr(self.settings, name) for name in bench.BenchSettings.model_fields}
        return bench.BenchSettings.model_validate({**kept, **changes})


@dataclass(frozen=True)
class PriorKnowledge:
    """The knowledge of a run before its first trial.

    Attributes:
        estimator: predicts times of plans; None if the rates of the links are unknown.
        samples: measured steps of other models and clusters.
        fitted: whether the estimator was fitted before, with constants of its own.
    """

    estimator: Estimator | None
    constants: Constants
    studies: Sequence[optuna.Study] = ()
    samples: Sequence[Sample] = ()
    fitted: bool = False

    @classmethod
    def of(cls, job: TuningJob) -> PriorKnowledge:
        """From the job's settings.

        Raises:
            DocumentError: a source of transfer or a fitted simulator cannot be used.
        """
        settings = job.settings
        constants = job_hosts(settings.launch_kind, settings.is_paced, settings.constants)
        transfer = load_transfer(settings.transfer, job.workload, job.cluster, settings.semantics)
        estimator = None
        if job.cluster.measured:
            seed = settings.search.seed or 0
            estimator = transfer.estimator or settings.simulator.for_job(job.workload, job.cluster, constants, seed)
        fitted = transfer.estimator is not None or settings.simulator.kind == PRETRAINED
        return cls(estimator, constants, transfer.studies, transfer.samples, fitted)

    def with_constants(self, job: TuningJob, constants: Constants) -> PriorKnowledge:
        """The same with other constants of the hosts; the estimator must not be fitted."""
        seed = job.settings.search.seed or 0
        estimator = job.settings.simulator.for_job(job.workload, job.cluster, constants, seed)
        return replace(self, constants=constants, estimator=estimator)
