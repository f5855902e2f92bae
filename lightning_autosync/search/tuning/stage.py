"""The live workers of a run: plans are set up on them, take turns, and are taken down; a crash costs a restart."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import AutoSyncError
from lightning_autosync.measure.bench.interleaving import Pool
from lightning_autosync.measure.emulation.check import measured_links
from lightning_autosync.measure.emulation.link_check import LinkCheck
from lightning_autosync.measure.workers import LaunchError, WorkerError, WorkerPool
from lightning_autosync.search.tuning.settings import Settings
from lightning_autosync.search.tuning.within_job import JobPool, JobRank

_CONTENDERS = "lightning_autosync.measure.bench.contenders"
_log = logging.getLogger(__name__)

Steps = Sequence[Sequence[float]]
"""Seconds, by rank and step."""


class TrialError(AutoSyncError, RuntimeError):
    """A plan could not be set up, or a step of it failed or hung; the message is the first line of the reason."""


@dataclass(eq=False)
class Entrant:
    """One way to synchronize, as workers are told it.

    Attributes:
        name: under which workers keep it; of one entrant at a time.
        order: arguments of `lightning_autosync.measure.bench.contenders.set_up`, but for the name.
        life: the pool in which it is set up, counted from 1; 0 for none.
    """

    name: str
    order: Mapping[str, Any]
    life: int = field(default=0)


class Stage:
    """A pool of workers and the entrants that live on it.

    The pool starts with the first order. When an order fails, whatever the workers hold is in doubt: the pool is ended,
    the next order starts another, and entrants are set up there anew when their turn comes.

    Args:
        settings: of the job: where its ranks run, and how long an order may take.
        cluster: whose links are emulated, if they are.

    Attributes:
        restarts: pools that were started after the first.
        links: what emulated links carry, measured at the start.
    """

    def __init__(self, settings: Settings, cluster: ClusterSpec) -> None:
        self._settings = settings
        self._cluster = cluster
        self._launched = ExitStack()
        self._launch: Any = None
        self._job: JobPool | None = None
        self._pool: Pool | None = None
        self._life = 0
        self.links: Sequence[LinkCheck] = ()

    def __enter__(self) -> Stage:
        if self._settings.within_job:
            self._job = JobPool(JobRank(self._settings.timeout, self._settings.scheduling == "batch"))
            self._launched.callback(self._job.end)
            return self
        self._launch = self._launched.enter_context(self._settings.launch.open(self._cluster))
        self.links = measured_links(self._launch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._launched.close()

    @property
    def restarts(self) -> int:
        return max(0, self._life - 1)

    @property
    def pool(self) -> Pool:
        """The live pool.

        Raises:
            LaunchError: workers cannot be started in the way asked for, or did not start twice.
        """
        if self._pool is None:
            try:
                self._pool = self._start()
            except WorkerError as error:  # on a busy machine one may be too late; twice is no chance
                _log.warning("workers did not start: %s; once more", reason(error))
                try:
                    self._pool = self._start()
                except WorkerError as again:
                    raise LaunchError(f"workers did not start twice: {reason(again)}") from None
            self._life += 1
        return self._pool

    def restart(self) -> None:
        """End the workers; the next order starts others."""
        self._end()

    def measure(self, entrant: Entrant, steps: int) -> Steps:
        """Seconds of each step by rank; the entrant is set up first where it is not.

        Raises:
            TrialError: a worker failed, died or did not answer in time.
            LaunchError: workers cannot be started again.
        """
        pool = self.pool
        try:
            if entrant.life != self._life:
                pool.run(f"{_CONTENDERS}:set_up", **{**entrant.order, "name": entrant.name})
                entrant.life = self._life
            found: Steps = pool.run(f"{_CONTENDERS}:measure", name=entrant.name, steps=steps)
        except WorkerError as error:
            _log.warning("%s: %s; the workers are started again", entrant.name, reason(error))
            self.restart()
            raise TrialError(reason(error)) from None
        return found

    def live(self, entrant: Entrant) -> bool:
        """Whether it is set up on the workers that there are."""
        return self._pool is not None and entrant.life == self._life

    def take_down(self, entrant: Entrant) -> None:
        """Let the workers forget an entrant."""
        if not self.live(entrant):
            return
        entrant.life = 0
        try:
            self.pool.run(f"{_CONTENDERS}:tear_down", name=entrant.name)
        except WorkerError as error:
            _log.warning("%s could not be taken down: %s; the workers are started again", entrant.name, reason(error))
            self.restart()

    def _start(self) -> Pool:
        settings = self._settings
        if self._job is not None:
            self._check_ranks(self._job)
            self._job.renew()
            return self._job
        _log.info("starting %d workers", self._cluster.world_size)
        scheduling = None if settings.scheduling == "none" else settings.scheduling
        return WorkerPool(self._cluster.world_size, self._launch, timeout=settings.timeout, scheduling=scheduling)

    def _check_ranks(self, job: JobPool) -> None:
        if job.world_size != self._cluster.world_size:
            raise LaunchError(
                f"launch=torchrun: the job has {job.world_size} ranks, cluster '{self._cluster.name}' has "
                f"{self._cluster.world_size}"
            )

    def _end(self) -> None:
        if self._pool is not None:
            with suppress(WorkerError):
                self._pool.close()
        self._pool = None


def reason(error: BaseException) -> str:
    """The first line of an error's message."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
