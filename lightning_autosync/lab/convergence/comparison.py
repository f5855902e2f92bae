"""The comparison: chooses learning rates, then trains with all methods in turn for each seed in the same workers."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import AutoSyncError, DocumentError
from lightning_autosync.lab.convergence.result import ConvergenceResult, Groups, TrainingRun, best_rate, load_rates
from lightning_autosync.lab.convergence.settings import ConvergenceSettings, MethodSettings
from lightning_autosync.lab.convergence.trial import TrainingBudget, time_to, train
from lightning_autosync.measure import conditions
from lightning_autosync.measure.bench.preparation import make_cluster
from lightning_autosync.measure.progress import Report, silent
from lightning_autosync.measure.session import MeasurementSession
from lightning_autosync.plan import SyncPlan, builders
from lightning_autosync.relaxed.grouping import BOUND, unconnected_windows
from lightning_autosync.workload import Workload, describe

TUNING_SEED = 1000
"""First seed of trainings that choose learning rates. The seeds of the compared trainings begin at 0."""


def compare(settings: ConvergenceSettings, report: Report = silent) -> ConvergenceResult:
    """Train with every method under all speeds.

    Args:
        report: told of each training.

    Raises:
        DocumentError: cluster and workers do not match, a method is wrong, or a learning rate is missing.
        WorkerError: a worker failed.
    """
    workload, cluster, plans = prepare(settings)
    known = load_rates(settings.rates_of, settings) if settings.rates_of else {}
    for name in plans:
        if name not in known and len(settings.grid(name)) > 1 and settings.tuning_seeds == 0:
            raise DocumentError(f"rates_of: {settings.rates_of} has no rate of '{name}'; set tuning_seeds to 1 or more")
    load_before = os.getloadavg()
    with MeasurementSession(cluster, settings.launch, settings.timeout, settings.scheduling) as session:
        tuned_names = [name for name in plans if name not in known and len(settings.grid(name)) > 1]
        trainings = sum(len(settings.grid(name)) * settings.tuning_seeds for name in tuned_names)
        trainings += len(settings.chosen_speeds) * sum(settings.seeds_of(name) for name in plans)
        comparison = _Comparison(
            settings, workload, cluster, plans, session, lambda count, text: report(count, trainings, text)
        )
        tuned = {name: comparison.tune(name) for name in tuned_names}
        rates = {
            name: best_rate(tuned[name]) if name in tuned else known.get(name, settings.grid(name)[0]) for name in plans
        }
        runs = [
            comparison.run(name, speed, seed, rates[name])
            for speed in settings.chosen_speeds
            for seed in range(settings.seeds)
            for name in plans
            if seed < settings.seeds_of(name)
        ]
        found = {
            **session.run(conditions.describe_worker, ranks=[0])[0],
            "load_average_before": load_before,
            "load_average_after": os.getloadavg(),
        }
    tuning = [run for found in tuned.values() for run in found]
    return ConvergenceResult(settings, workload.bytes, rates, runs, tuning, found)


class Prepared(NamedTuple):
    """The workload, the cluster, and the plan of each method."""

    workload: Workload
    cluster: ClusterSpec
    plans: dict[str, SyncPlan]


def prepare(settings: ConvergenceSettings) -> Prepared:
    """Check everything that can be checked before a worker starts.

    Raises:
        DocumentError: cluster and workers do not match, or a method is wrong.
    """
    workload = describe(settings.task.module(), name=settings.task.kind)
    cluster = make_cluster(settings, settings.workers if settings.cluster is None else None)
    if cluster.world_size != settings.workers:
        raise DocumentError(
            f"workers: {settings.workers} requested, but cluster '{cluster.name}' has {cluster.world_size} devices"
        )
    plans = {name: _plan(name, settings.methods[name], workload, cluster) for name in settings.chosen_methods}
    return Prepared(workload, cluster, plans)


class _Comparison:
    """Runs one training after the other on the workers."""

    def __init__(
        self,
        settings: ConvergenceSettings,
        workload: Workload,
        cluster: ClusterSpec,
        plans: dict[str, SyncPlan],
        session: MeasurementSession,
        report: Callable[[int, str], None],
    ) -> None:
        self._settings, self._workload, self._cluster = settings, workload, cluster
        self._plans, self._session = plans, session
        self._report = report
        self._count = 0

    def tune(self, name: str) -> list[TrainingRun]:
        """Train with each learning rate of a method's grid."""
        settings = self._settings
        return [
            self.run(name, settings.tuning_speed, TUNING_SEED + number, rate)
            for rate in settings.grid(name)
            for number in range(settings.tuning_seeds)
        ]

    def run(self, name: str, speed: str, seed: int, rate: float) -> TrainingRun:
        """Train once."""
        settings = self._settings
        self._count += 1
        load = self._session.watch_load()
        found = self._session.run(
            train,
            task=settings.task.model_dump(),
            method=settings.methods[name].model_dump(),
            plan=self._plans[name].to_dict(),
            workload=self._workload.to_dict(),
            cluster=self._cluster.to_dict(),
            straggler={"slowdowns": [slowdown.model_dump() for slowdown in settings.speeds[speed]]},
            budget=settings.model_dump(include={field.name for field in fields(TrainingBudget)}),
            rate=rate,
            momentum=settings.momentum,
            seed=seed,
            key=f"training-{self._count}",
            timeout=settings.timeout,
        )
        foreign_cores = load.foreign_cores()
        groups = _joined_groups(found, self._plans[name].consistency.isolation or BOUND)
        measured = _joined(found, settings.target)
        run = TrainingRun(name, speed, seed, rate, **measured, foreign_cores=foreign_cores, groups=groups)
        reached = "" if run.reached is None else f", {settings.target:g} % after {run.reached:.2f} s"
        self._report(self._count, f"{name}, {speed}, seed {seed}, rate {rate:g}: {run.final:.1f} %{reached}")
        return run


def _joined(found: list[dict[str, Any]], target: float | None) -> dict[str, Any]:
    """Fields of a `TrainingRun` from the results of its ranks."""
    judged = sorted(pair for rank in found for pair in zip(rank["moments"], rank["scores"], strict=True))
    moments, scores = [moment for moment, _ in judged], [score for _, score in judged]
    steps = [rank["steps"] for rank in found]
    sent = [rank["bytes_sent"] for rank in found]
    return {
        "final": found[0]["final"],
        "reached": None if target is None else time_to(target, moments, scores),
        "seconds": max(rank["seconds"] for rank in found),
        "steps": steps,
        "waiting": [rank["waiting"] for rank in found],
        "sent": None if None in sent else [size / max(1, count) for size, count in zip(sent, steps, strict=True)],
        "state_bytes": [rank["state_bytes"] for rank in found],
        "moments": moments,
        "scores": scores,
    }


def _plan(name: str, method: MethodSettings, workload: Workload, cluster: ClusterSpec) -> SyncPlan:
    try:
        plan = builders.build(method.builder, workload, cluster, **method.arguments)
        if method.consistency is not None:
            plan = SyncPlan.from_dict({**plan.to_dict(), "consistency": method.consistency.model_dump()}, source="plan")
        return plan
    except AutoSyncError as error:
        raise DocumentError(f"methods.{name}: {error}") from None


def _joined_groups(found: list[dict[str, Any]], bound: int) -> Groups | None:
    """The groups of a run that formed while all workers were active, in the order of forming."""
    told = {group["generation"]: group for rank in found for group in rank["groups"]}
    formed = [told[generation] for generation in sorted(told) if told[generation]["active"] == len(found)]
    if not formed:
        return None
    members = [group["members"] for group in formed]
    unconnected, windows = unconnected_windows(members, len(found), bound)
    return Groups(len(formed), sum(group["bridging"] for group in formed), windows, unconnected)
