"""Live workers that measure contenders. Contenders are set up, take turns and are removed; a crash costs a restart."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from typing_extensions import Self

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import counted
from lightning_autosync.measure import replica_calls
from lightning_autosync.measure.conditions import LoadMeter, machine
from lightning_autosync.measure.emulation.check import LinkCheck, measured_links
from lightning_autosync.measure.launches.launch import Launch
from lightning_autosync.measure.launches.settings import StartedLaunch
from lightning_autosync.measure.step_time import Steps
from lightning_autosync.measure.workers import InputError, LaunchError, WorkerError, WorkerPool
from lightning_autosync.measure.workers.devices import Device
from lightning_autosync.measure.workers.job_pool import JobPool, JobRank

Scheduling = Literal["none", "batch"]
Pool = WorkerPool | JobPool
"""Live workers that call functions."""
_log = logging.getLogger(__name__)


class ContenderError(WorkerError):
    """A worker failed while a contender was set up or measured. For wrong input the message is that of the failure.

    Attributes:
        contender: name of the contender.
        failure: error of the workers.
    """

    def __init__(self, contender: str, failure: WorkerError) -> None:
        message = str(failure) if isinstance(failure, InputError) else f"contender '{contender}': {failure}"
        super().__init__(message, failure.rank, failure.traceback, failure.kind, failure.reason)
        self.contender = contender
        self.failure = failure


@dataclass(eq=False)
class Contender:
    """One way to synchronize, set up in workers under a name.

    Attributes:
        name: unique name among the contenders that are set up.
        order: arguments of `lightning_autosync.measure.replica_calls.set_up`, without the name.
        pool_number: number of the pool in which the contender is set up, counted from 1; 0 if it is not set up.
    """

    name: str
    order: Mapping[str, Any]
    pool_number: int = field(default=0)


class MeasurementSession:
    """A pool of workers and the contenders that are set up on it.

    The pool starts when it is first needed. After an error the state of the workers is unknown, so the pool is closed.
    The next call starts a new pool, and contenders are set up again when they are measured next.

    Args:
        cluster: cluster on which workers run; an emulated launch emulates its links.
        launch: where workers run.
        timeout: maximum seconds of one call.
        scheduling: the kernel's scheduling policy for the workers.
        within_job: whether the workers are the ranks of a torchrun job, of which this process is rank 0.
        device: where workers that this session starts train.

    Attributes:
        links: measured rates of emulated links.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        launch: StartedLaunch,
        timeout: float,
        scheduling: Scheduling = "batch",
        within_job: bool = False,
        device: Device = "cpu",
    ) -> None:
        self._cluster = cluster
        self._launch_settings = launch
        self._timeout = timeout
        self._scheduling: Scheduling = scheduling
        self._within_job = within_job
        self._device: Device = device
        self._stack = ExitStack()
        self._launch: Launch | None = None
        self._job: JobPool | None = None
        self._pool: Pool | None = None
        self._pool_number = 0
        self.links: Sequence[LinkCheck] = ()

    def __enter__(self) -> Self:
        with ExitStack() as opened:  # which closes the launch if the check of its links fails
            if self._within_job:
                self._job = JobPool(JobRank(self._timeout, self._scheduling == "batch"))
                opened.callback(self._job.end)
            else:
                self._launch = opened.enter_context(self._launch_settings.open(self._cluster))
                self.links = measured_links(self._launch)
            self._stack = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.restart()
        self._stack.close()

    @property
    def restarts(self) -> int:
        """Number of pools that were started after the first one."""
        return max(0, self._pool_number - 1)

    @property
    def pool(self) -> Pool:
        """The live pool.

        Raises:
            InputError: workers cannot use the device.
            LaunchError: workers cannot be started here, or failed to start twice.
        """
        if self._pool is None:
            try:
                self._pool = self._start()
            except InputError:
                raise
            except WorkerError as error:  # a busy machine may delay a worker beyond the timeout once
                _log.warning("workers did not start: %s; trying once more", reason(error))
                try:
                    self._pool = self._start()
                except WorkerError as again:
                    raise LaunchError(f"workers did not start at the second attempt: {reason(again)}") from None
            self._pool_number += 1
        return self._pool

    def restart(self) -> None:
        """Close the pool. The next call starts a new one."""
        if self._pool is not None:
            with suppress(WorkerError):
                self._pool.close()
        self._pool = None

    def run(
        self, function: Callable[..., Any], /, *, ranks: Iterable[int] | None = None, **arguments: Any
    ) -> list[Any]:
        """Like `WorkerPool.run`, but an error closes the pool."""
        pool = self.pool
        try:
            return pool.run(function, ranks=ranks, **arguments)
        except WorkerError:
            self.restart()
            raise

    def set_up(self, contender: Contender) -> None:
        """Create a contender in the workers unless it is live. Raises the same errors as `call`."""
        pool = self.pool  # outside the turn, so that an error at the start of workers is not the contender's
        if self.live(contender):
            return
        with self._turn_of(contender):
            pool.run(replica_calls.set_up, **{**contender.order, "name": contender.name})
            contender.pool_number = self._pool_number

    def call(self, contender: Contender, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Call a function of `replica_calls` for a contender on all ranks; sets the contender up if necessary.

        Raises:
            ContenderError: a worker failed, died or did not answer in time.
            LaunchError: workers cannot be started again.
        """
        self.set_up(contender)
        with self._turn_of(contender):
            return self.pool.run(function, name=contender.name, **arguments)

    def measure(self, contender: Contender, steps: int) -> Steps:
        """Seconds of each step by rank. Raises the same errors as `call`."""
        found: Steps = self.call(contender, replica_calls.measure, steps=steps)
        return found

    def live(self, contender: Contender) -> bool:
        """Whether the contender is set up on the current workers."""
        return self._pool is not None and contender.pool_number == self._pool_number

    def take_down(self, contender: Contender) -> None:
        """Remove a contender from the workers."""
        if not self.live(contender):
            return
        contender.pool_number = 0
        try:
            self.run(replica_calls.tear_down, name=contender.name)
        except WorkerError as error:
            _log.warning(
                "%s could not be removed from the workers: %s; stopping the workers", contender.name, reason(error)
            )

    def watch_load(self) -> LoadMeter:
        """Start to count the load of other processes, if all workers run on this machine."""
        relays = () if self._launch is None else self._launch.relays
        return LoadMeter([*self.pool.pids, *relays] if self._is_here else None)

    @contextmanager
    def _turn_of(self, contender: Contender) -> Iterator[None]:
        try:
            yield
        except WorkerError as error:
            self.restart()
            raise ContenderError(contender.name, error) from None

    @cached_property
    def machines(self) -> list[tuple[str, str]]:
        """Id and name of each machine on which workers run."""
        return sorted({(identity, name) for identity, name in self.run(machine)})

    @cached_property
    def _is_here(self) -> bool:
        # By ssh, srun or Ray, workers are not children of this process even here, so that their load is unknown.
        return self._launch_settings.kind not in ("ssh", "slurm", "ray") and self.machines == [machine()]

    def _start(self) -> Pool:
        if self._job is not None:
            self._check_ranks(self._job)
            self._job.renew()
            return self._job
        _log.info("starting %s", counted(self._cluster.world_size, "worker"))
        scheduling = None if self._scheduling == "none" else self._scheduling
        return WorkerPool(
            self._cluster.world_size,
            self._launch,
            timeout=self._timeout,
            scheduling=scheduling,
            device=self._device,
        )

    def _check_ranks(self, job: JobPool) -> None:
        if job.world_size != self._cluster.world_size:
            raise LaunchError(
                f"launch=torchrun: the job has {job.world_size} ranks, but cluster '{self._cluster.name}' has "
                f"{self._cluster.world_size}"
            )


def reason(error: BaseException) -> str:
    """The first line of an error's message."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
