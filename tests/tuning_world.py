"""A tuning run without workers: a real job, a real study, and steps that take what the replay says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from priced_session import PricedSession

from lightning_autosync.cluster import resolve_cluster
from lightning_autosync.learned import ReplayEstimator
from lightning_autosync.measure.emulation.network import emulable
from lightning_autosync.measure.reference import ReferencePlan
from lightning_autosync.plan import SyncPlan, compile_plan
from lightning_autosync.plan.space import PlanSpace
from lightning_autosync.replay import Replay
from lightning_autosync.search import studies
from lightning_autosync.search.tuning.job import PriorKnowledge, TuningJob
from lightning_autosync.search.tuning.opponents import Opponents, builder_plans, settle_reference
from lightning_autosync.search.tuning.result import TuningResult
from lightning_autosync.search.tuning.samplers import make_sampler
from lightning_autosync.search.tuning.settings import TuningSettings
from lightning_autosync.search.tuning.trials import Trials
from lightning_autosync.search.tuning.tuner import Tuner

MODEL = {"kind": "paced", "catalogue": "vgg16", "scale": 0.002, "compute": "20 ms"}
CLUSTER = emulable(resolve_cluster("fat_node_star"), 50e6)
DDP_SECONDS = 0.4
_SECONDS: dict[str, float] = {}
"""What the replay says of plans, which is the same in all worlds."""


def configuration(**search: Any) -> dict[str, Any]:
    given = {"sampler": "random", "budget": 16, "batch": 3, **search}
    return {"model": MODEL, "cluster": CLUSTER.to_dict(), "search": given, "prediction_seconds": 0}


def settings(**search: Any) -> TuningSettings:
    return TuningSettings.parse(configuration(**search))


def result_of(job: TuningJob, **found: Any) -> TuningResult:
    """A result with these fields."""
    about = {"cluster": job.cluster.to_dict(), "workload": job.workload.to_dict()}
    return TuningResult(**{**about, "trials": (), **found})


class World:
    """A job whose steps take what the replay says, times a factor that a test may change."""

    def __init__(self, folder: Path | None = None, storage: Any = None, **search: Any) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.settings = settings(**search)
        self.job = TuningJob.of(self.settings)
        self.space = PlanSpace(self.job.workload, self.job.cluster)
        self.replay = Replay(self.job.workload, self.job.cluster)
        self.factor = 1.0
        self.session = PricedSession(self.price)
        self.storage = storage or (optuna.storages.InMemoryStorage() if folder is None else folder / "study.journal")
        self.prices: dict[str, float] = {}

    def price(self, name: str, order: Mapping[str, Any]) -> float:
        return self.factor * (DDP_SECONDS if "ddp" in order else self.plan_price(SyncPlan.from_dict(order["plan"])))

    def plan_price(self, plan: SyncPlan) -> float:
        if plan.fingerprint not in self.prices:
            if plan.fingerprint not in _SECONDS:
                schedule = compile_plan(plan, self.job.workload, self.job.cluster)
                _SECONDS[plan.fingerprint] = self.replay.predict(schedule, "fluid").step_time
            self.prices[plan.fingerprint] = _SECONDS[plan.fingerprint]
        return self.prices[plan.fingerprint]

    def trials(self, run: str = "here", alone: bool = True) -> Trials:
        sampler = make_sampler(self.settings.search, self.space, PriorKnowledge.of(self.job))
        study = studies.open_study(self.storage, "tune", self.space, sampler=sampler)
        trials = Trials(study, self.space, self.settings.search.sampler, run, alone)
        trials.end_interrupted()
        studies.enqueue_baselines(study, self.space)
        return trials

    def reference(self, trials: Trials) -> ReferencePlan:
        made = self.new_reference()
        settle_reference(made, trials.study, list(builder_plans(self.job).values()))
        return made

    def new_reference(self, session: PricedSession | None = None) -> ReferencePlan:
        return ReferencePlan(session or self.session, self.job.plan_order, self.settings.trial.warm_up)

    def opponents(self, trials: Trials, reference: ReferencePlan) -> Opponents:
        return Opponents(self.job, self.session, reference, trials.study, trials.own)  # type: ignore[arg-type]

    def tuner(self, trials: Trials, replay: Any = None) -> Tuner:
        """With ``replay`` to price plans; None takes the one of `tune`."""
        reference = self.reference(trials)
        opponents = self.opponents(trials, reference)
        opponents.measure({})
        replay = ReplayEstimator() if replay is None else replay
        return Tuner(self.job, self.session, trials, opponents, reference, replay)  # type: ignore[arg-type]
