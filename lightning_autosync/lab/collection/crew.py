"""Live workers on a cluster's emulated links, which measure batches of plans."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.lab.collection.combinations import Combination
from lightning_autosync.lab.collection.job import Budget
from lightning_autosync.lab.collection.settings import Settings
from lightning_autosync.measure.bench.load import LoadMeter
from lightning_autosync.measure.emulation.launch import EmulatedLaunch
from lightning_autosync.measure.workers import WorkerPool

_JOB = "lightning_autosync.lab.collection.job"


@dataclass(frozen=True)
class Batch:
    """What a batch took.

    Attributes:
        steps: by plan, seconds of each step of the slowest rank.
        foreign_cores: cores that others kept busy meanwhile; None where unknown.
    """

    steps: list[list[float]]
    foreign_cores: float | None


class Crew:
    """The workers of one cluster; they start with the first batch, and again after one that they did not survive.

    Raises:
        LaunchError: (with the first batch) links cannot be emulated here.
    """

    def __init__(self, cluster: ClusterSpec, settings: Settings) -> None:
        self._cluster = cluster
        self._settings = settings
        least, most = settings.steps
        self._budget = Budget(settings.warm_up, settings.seconds, least, most, settings.timeout)
        self._stack = ExitStack()
        self._launch: EmulatedLaunch | None = None
        self._pool: WorkerPool | None = None
        self._load: LoadMeter | None = None
        self._prepared: Combination | None = None

    def measure(self, combination: Combination, plans: Sequence[dict[str, Any]]) -> Batch:
        """Measure plans, as plain data, one after the other.

        Raises:
            WorkerError: a plan failed, or did not end in time.
        """
        pool = self._live()
        if self._prepared is not combination:
            workload, cluster = combination.workload.to_dict(), combination.cluster.to_dict()
            pool.run(f"{_JOB}:prepare", workload=workload, cluster=cluster)
            self._prepared = combination
        assert self._load is not None
        self._load.restart()
        by_rank = pool.run(f"{_JOB}:measure", plans=plans, budget=asdict(self._budget))
        foreign = self._load.foreign_cores()
        return Batch([slowest_rank(by_plan) for by_plan in zip(*by_rank, strict=True)], foreign)

    def ask(self, function: str) -> Any:
        """What a function says on the first rank."""
        return self._live().run(function, ranks=[0])[0]

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _live(self) -> WorkerPool:
        if self._launch is None:
            self._launch = self._stack.enter_context(EmulatedLaunch(self._cluster))
        if self._pool is None or self._pool.closed:
            settings = self._settings
            policy = None if settings.scheduling == "none" else settings.scheduling
            timeout = settings.timeout * (settings.batch + 1)
            pool = WorkerPool(self._cluster.world_size, self._launch, timeout=timeout, scheduling=policy)
            self._pool = self._stack.enter_context(pool)
            self._load = LoadMeter(pool.pids)
            self._prepared = None
        return self._pool


def slowest_rank(steps_by_rank: Sequence[list[float]]) -> list[float]:
    """The steps of the rank with the longest median."""
    return max(steps_by_rank, key=statistics.median)
