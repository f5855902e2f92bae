"""The job that is tuned: its model's workload, its cluster, and the orders by which workers set contenders up."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import optuna

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import checked, parse_json, shown
from lightning_autosync.errors import DocumentError
from lightning_autosync.measure.bench import settings as bench
from lightning_autosync.measure.bench.preparation import prepare
from lightning_autosync.measure.bench.settings import DDPOptions
from lightning_autosync.measure.session import MeasurementSession
from lightning_autosync.plan import SyncPlan
from lightning_autosync.search.storages import StudyError, storage_errors
from lightning_autosync.search.tuning.profile import profile
from lightning_autosync.search.tuning.settings import Settings
from lightning_autosync.workload import Workload

PACED = ("paced", "flat")
"""Kinds of models whose times are known, since they compute by the clock or not at all."""
JOB = "autosync:job"
"""User attribute of a study: what its times depend on beside workload and cluster, as JSON text."""
_Facts = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What is trained where.

    Attributes:
        settings: of the run.
        cluster: the machines, scaled and ordered.
        workload: the model's variables; embedding tables as those of which rows travel.
    """

    settings: Settings
    cluster: ClusterSpec
    workload: Workload

    @classmethod
    def of(cls, settings: Settings) -> Job:
        """The job as described; what is wrong with model, cluster or further contenders shows here.

        Raises:
            DocumentError: any of them.
        """
        prepared = prepare(settings)
        if prepared.cluster.world_size < 2:
            raise DocumentError("ranks: one rank has nothing to synchronize; a search needs two or more")
        return cls(settings, prepared.cluster, prepared.workload)

    @property
    def measured_model(self) -> bool:
        """Whether the model really computes, so that its times have to be measured."""
        return self.settings.model.kind not in PACED

    def profiled(self, session: MeasurementSession) -> Job:
        """The job with the times of its slowest rank, all ranks computing side by side."""
        found = session.run(profile, model=self.settings.model.model_dump())
        workloads = [Workload.from_dict(data, "profile") for data in found]
        return replace(self, workload=max(workloads, key=lambda one: one.forward_time + one.backward_time))

    @storage_errors()
    def hold(self, study: optuna.Study) -> None:
        """See to it that times of a study are of jobs like this one.

        Raises:
            StudyError: it is of another model or launch, or of workers that are scheduled otherwise.
            StorageError: its storage does not answer.
        """
        settings = self.settings
        launch = "torchrun" if settings.within_job else settings.launch.kind
        model = settings.model.model_dump(mode="json")
        own = {"model": model, "launch": launch, "scheduling": settings.scheduling}
        where = f"study '{study.study_name}': {JOB}"
        kept: Any = checked(_Facts, parse_json(study.user_attrs.get(JOB, "{}"), where, StudyError), where, StudyError)
        for name, value in own.items():
            if name in kept and kept[name] != value:
                raise StudyError(
                    f"{name}: study '{study.study_name}' was measured with {shown(kept[name])}, not {value!r}; give "
                    "that or another study.name or hydra.run.dir"
                )
        study.set_user_attr(JOB, json.dumps(own))

    def session(self) -> MeasurementSession:
        """Workers for it, as the settings say."""
        chosen = self.settings
        return MeasurementSession(self.cluster, chosen.launch, chosen.timeout, chosen.scheduling, chosen.within_job)

    def plan_order(self, plan: SyncPlan) -> dict[str, Any]:
        """Arguments of `lightning_autosync.measure.replica_calls.set_up` for a plan, but for the name."""
        return {**self._order(), "plan": plan.to_dict(), "workload": self.workload.to_dict()}

    def ddp_order(self, options: DDPOptions) -> dict[str, Any]:
        """The same for DDP."""
        return {**self._order(), "ddp": options.model_dump()}

    def _order(self) -> dict[str, Any]:
        model = self.settings.model.model_dump()
        patience = self.settings.patience
        return {"model": model, "sparse": False, "cluster": self.cluster.to_dict(), "timeout": patience}


def bench_settings(settings: Settings, **changes: Any) -> bench.BenchSettings:
    """What of the settings a bench takes, some fields changed."""
    kept = {name: getattr(settings, name) for name in bench.BenchSettings.model_fields}
    return bench.BenchSettings.model_validate({**kept, **changes})
