"""The collection: measures batches of plans for each combination and writes them to the dataset."""

from __future__ import annotations

import logging
import os
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.lab.collection.drawing import Combination, DrawnPlan, draw_plans
from lightning_autosync.lab.collection.settings import CollectionSettings
from lightning_autosync.learned.dataset import Conditions, Entry, Sample, Writer
from lightning_autosync.measure.conditions import describe_worker, usable_cores
from lightning_autosync.measure.launches.settings import LaunchSettings
from lightning_autosync.measure.progress import Report, silent
from lightning_autosync.measure.replica_calls import StepBudget, measure_plans
from lightning_autosync.measure.session import MeasurementSession, reason
from lightning_autosync.measure.workers import WorkerError
from lightning_autosync.plan import SyncPlan
from lightning_autosync.replay import Constants
from lightning_autosync.step_times import job_steps

_log = logging.getLogger(__name__)


_FAR = 3.0
"""Factor on the seconds budgeted for all steps of a plan. If a single step takes longer, only one is counted."""
_PACKAGES = ("lightning-autosync", "torch", "numpy")


class _Measured(NamedTuple):
    """The measurement of a batch of plans.

    Attributes:
        steps: by plan, seconds of each step, the mean of ranks.
        foreign_cores: number of cores that other processes kept busy; None if unknown.
    """

    steps: Sequence[Sequence[float]]
    foreign_cores: float | None


@dataclass
class Progress:
    """The progress of a run.

    Attributes:
        measured: number of measured pairs.
        disturbed: number of these that were measured beside too much other load.
        failed: plans that failed, with their errors.
        drawing: seconds spent on drawing plans.
        measuring: seconds spent in calls to workers.
        stepping: seconds of these spent in steps, warm-up included.
    """

    measured: int = 0
    disturbed: int = 0
    failed: list[dict[str, str]] = field(default_factory=list)
    drawing: float = 0.0
    measuring: float = 0.0
    stepping: float = 0.0


class Collector:
    """Measures the pairs that a dataset lacks or has only with disturbed measurements."""

    def __init__(
        self, settings: CollectionSettings, constants: Constants, writer: Writer, report: Report = silent
    ) -> None:
        self.progress = Progress()
        self._report = report
        self._visited = 0
        self._settings = settings
        self._constants = constants
        self._writer = writer
        self._drafts: dict[str, list[DrawnPlan]] = {}
        self._environment: dict[str, Any] | None = None

    def run(self, combinations: Sequence[Combination]) -> None:
        """Visit all combinations, cluster by cluster, ``passes`` times.

        Raises:
            LaunchError: links cannot be emulated here.
            WorkerError: more plans failed than the settings allow.
        """
        for turn in range(self._settings.passes):
            for _, group in groupby(combinations, key=lambda combination: combination.cluster.fingerprint):
                of_cluster = list(group)
                with self._session(of_cluster[0].cluster) as session:
                    for combination in of_cluster:
                        self._visit(session, combination, turn)
                        self._visited += 1
                        counts = f"{self.progress.measured} measured, {len(self._writer.keys)} in the dataset"
                        total = len(combinations) * self._settings.passes
                        self._report(self._visited, total, f"{counts}, {combination.name}")
                self._writer.flush()

    def _session(self, cluster: ClusterSpec) -> MeasurementSession:
        settings = self._settings
        timeout = settings.timeout * (settings.batch + 1)
        return MeasurementSession(cluster, LaunchSettings(kind="emulated"), timeout, settings.scheduling)

    def _visit(self, session: MeasurementSession, combination: Combination, turn: int) -> None:
        """Measure this turn's part of a combination's plans, without those that have an undisturbed measurement."""
        drafts = self._draw(combination)
        keys = self._writer.keys
        missing = [draft for draft in drafts[turn :: self._settings.passes] if draft.key not in keys]
        for start in range(0, len(missing), self._settings.batch):
            self._measure(session, combination, drafts[0], missing[start : start + self._settings.batch])

    def _draw(self, combination: Combination) -> list[DrawnPlan]:
        if combination.name not in self._drafts:
            start = time.perf_counter()
            self._drafts[combination.name] = draw_plans(self._settings, self._constants, combination)
            self.progress.drawing += time.perf_counter() - start
        return self._drafts[combination.name]

    def _measure(
        self, session: MeasurementSession, combination: Combination, reference: DrawnPlan, missing: Sequence[DrawnPlan]
    ) -> None:
        """Measure one batch, the reference plan first; if the batch fails, measure its plans one by one."""
        drafts = [reference, *(draft for draft in missing if draft is not reference)]
        try:
            batch = self._measure_batch(session, combination, drafts)
        except WorkerError as error:
            if len(missing) == 1:
                self._fail(combination, missing[0], error)
                return
            for draft in missing:
                self._measure(session, combination, reference, [draft])
            return
        if self._environment is None:
            self._environment = describe_environment(session.run(describe_worker, ranks=[0])[0])
        entries = list(self._entries(combination, drafts, batch, self._environment))
        self._writer.append(entries)
        # The writer's count differs: it skips pairs that were disturbed again, and may add the reference plan.
        self.progress.measured += len(missing)
        self.progress.disturbed += len(missing) * entries[0].conditions.disturbed

    def _measure_batch(
        self, session: MeasurementSession, combination: Combination, drafts: list[DrawnPlan]
    ) -> _Measured:
        start, settings = time.perf_counter(), self._settings
        min_steps, max_steps = settings.steps
        budget = StepBudget(settings.warm_up, settings.seconds, min_steps, max_steps, _FAR * settings.seconds)
        load = session.watch_load()
        by_rank = session.run(
            measure_plans,
            workload=combination.workload.to_dict(),
            cluster=combination.cluster.to_dict(),
            plans=[draft.plan for draft in drafts],
            budget=asdict(budget),
            timeout=settings.timeout,
        )
        foreign, by_plan = load.foreign_cores(), [job_steps(steps) for steps in zip(*by_rank, strict=True)]
        self.progress.measuring += time.perf_counter() - start
        self.progress.stepping += sum(
            sum(taken) / len(taken) * (len(taken) + self._settings.warm_up) for taken in by_plan
        )
        return _Measured(by_plan, foreign)

    def _entries(
        self, combination: Combination, drafts: list[DrawnPlan], batch: _Measured, environment: dict[str, Any]
    ) -> Iterator[Entry]:
        """The samples of a batch, the reference plan's first."""
        foreign = batch.foreign_cores
        conditions = Conditions(
            environment=environment,
            seed=self._settings.seed,
            foreign_cores=foreign,
            load=os.getloadavg()[0],
            disturbed=foreign is not None and foreign > self._settings.quiet,
            measured_at=int(time.time()),
        )
        reference = statistics.median(batch.steps[0])
        for draft, steps in zip(drafts, batch.steps, strict=True):
            plan = SyncPlan.from_dict(draft.plan)
            sample = Sample(
                combination.workload,
                combination.cluster,
                plan,
                tuple(steps),
                draft.kind,
                draft.replayed,
                reference=reference,
            )
            yield Entry(sample, conditions)

    def _fail(self, combination: Combination, draft: DrawnPlan, error: WorkerError) -> None:
        why = reason(error)
        _log.warning("%s: a plan of kind '%s' failed: %s", combination.name, draft.kind, why)
        self.progress.failed.append({"combination": combination.name, "plan": draft.text, "error": why})
        if len(self.progress.failed) > self._settings.failures:
            raise error


def describe_environment(worker: dict[str, Any]) -> dict[str, Any]:
    """The machine and the software as plain data; ``worker`` is the result of `describe_worker`."""
    return {
        **worker,
        "system": platform.system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": usable_cores(),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in _PACKAGES},
        "emulated": {"links": True, "compute": True},
    }


def _processor() -> str:
    """The model name of the first core from ``/proc/cpuinfo``, if there is one."""
    table = Path("/proc/cpuinfo")
    lines = table.read_text().splitlines() if table.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
