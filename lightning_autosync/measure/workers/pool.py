"""A pool of live worker processes that are started once and call one function after another."""

from __future__ import annotations

import json
import os
import selectors
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from lightning_autosync.measure.errors import LaunchError, WorkerError
from lightning_autosync.measure.launches.launch import Launch, LocalLaunch
from lightning_autosync.measure.progress import Report, silent
from lightning_autosync.measure.workers.calls import function_name, wrong_input
from lightning_autosync.measure.workers.devices import Device
from lightning_autosync.measure.workers.process import WorkerProcess

GRACE = 5.0  # seconds for the other ranks to answer after one has raised
RENEWAL = 15.0  # seconds for all ranks to form a new process group
POLL = 0.25  # seconds between checks that silent workers are alive
DRAIN = 1.0  # maximum seconds to read what a worker printed before its answer
STACK_DUMP = 0.3  # seconds for a silent worker to write its stacks


class WorkerPool:
    """``world_size`` processes in one gloo process group that call functions on request.

    The processes start and join the group before the constructor returns. They are killed with their children by
    :meth:`close`, at the end of a ``with`` block, when the pool is no longer referenced, and when this process ends in
    any way.

    Args:
        launch: where the processes run; None means this machine.
        timeout: maximum seconds of the start, of one call and of a collective.
        threads: torch's intra-operator threads in each process.
        environment: additional environment variables of the workers.
        extra_paths: additional folders from which workers import, beside everything that this process can import.
        scheduling: ``"batch"`` puts the workers under ``SCHED_BATCH``
            (see :func:`lightning_autosync.engine.cpu_scheduling.set_batch_scheduling`).
        order_timeout: maximum seconds of one call if they differ from ``timeout``; ``math.inf`` for no limit.
        process_group: whether to make the process group. If False, the called functions make one with ``env://`` as
            under torchrun, and an error closes the pool.
        echo: whether to copy what rank 0 prints to this process's stderr.
        device: where the workers train. On ``cuda``, their process group has NCCL beside gloo.

    Raises:
        LaunchError: the launch requires another number of ranks, or ``scheduling`` is unknown.
        WorkerError: a worker did not start or could not join the group.
    """

    def __init__(
        self,
        world_size: int,
        launch: Launch | None = None,
        timeout: float = 120.0,
        threads: int = 1,
        environment: Mapping[str, str] | None = None,
        extra_paths: Sequence[str | os.PathLike[str]] = (),
        scheduling: Literal["batch"] | None = None,
        order_timeout: float | None = None,
        process_group: bool = True,
        echo: bool = False,
        device: Device = "cpu",
    ) -> None:
        self.world_size = world_size
        self.launch = launch or LocalLaunch()
        self.timeout = timeout if order_timeout is None else order_timeout
        self._makes_group = process_group
        self._device: Device = device
        if self.launch.world_size not in (None, world_size):
            raise LaunchError(f"the launch is for {self.launch.world_size} ranks, but the pool has {world_size}")
        if scheduling not in (None, "batch"):
            raise LaunchError(f"scheduling: '{scheduling}' is not known; allowed: 'batch' or None")
        self._lock = threading.Lock()
        self._generation = 0
        self._limit = self.timeout
        """Seconds in which all ranks must answer the present order."""
        self._workers: list[WorkerProcess] = []
        # The finalizer gets the list and not the pool, since a reference to the pool would keep it alive.
        self._finalizer = weakref.finalize(self, _end_all, self._workers, os.getpid())
        command = _worker_command(timeout, threads, scheduling)
        try:
            for rank in range(world_size):
                variables = {
                    **_common_environment(threads, extra_paths),
                    **self.launch.environment(rank),
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "MASTER_ADDR": self.launch.address,
                    **(environment or {}),
                }
                started, surroundings = self.launch.command(rank, command, variables)
                parting = self.launch.parting
                self._workers.append(WorkerProcess(rank, started, surroundings, echo and rank == 0, parting))
            deadline = time.monotonic() + timeout
            self._port = self._exchange([0], {"action": "serve"}, deadline)[0]
            self._join(deadline)
        except BaseException:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        """Whether the processes have ended, by :meth:`close` or because one of them failed."""
        return not self._finalizer.alive

    @property
    def pids(self) -> list[int]:
        """The process id of each rank."""
        return [worker.pid for worker in self._workers]

    def run(
        self,
        function: Callable[..., Any],
        /,
        *,
        ranks: Iterable[int] | None = None,
        report: Report | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """Call a function with ``arguments`` on every rank, or on ``ranks`` only.

        Workers import the function by name, so it must be at the top level of a module. The default process group
        exists when the function starts, unless ``process_group`` is False. Arguments and results are sent as JSON, so
        tuples become lists. With ``report``, the function gets an argument of this name, a `Report` too. What it tells
        rank 0's is told to the caller's.

        Returns:
            The result of each addressed rank, in the order of ``ranks``.

        Raises:
            TypeError: workers cannot import the function, or an argument is not JSON.
            WorkerError: a rank raised. If every rank answered, the pool continues with a new process group, without
                earlier subgroups. Otherwise, for example if a rank died or did not answer within ``timeout`` seconds,
                the pool is closed.
            InputError: all failed ranks report wrong input.
        """
        with self._lock:
            if self.closed:
                raise WorkerError("the pool is closed", rank=0)
            addressed = self._check_ranks(ranks)
            call = {"function": function_name(function), "arguments": arguments, "reports": report is not None}
            deadline = time.monotonic() + self.timeout
            return self._exchange(addressed, {"action": "call", **call}, deadline, report or silent)

    def close(self) -> None:
        """End every process of the pool; may be called again, and from a signal handler."""
        self._finalizer()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_ranks(self, ranks: Iterable[int] | None) -> list[int]:
        addressed = list(range(self.world_size) if ranks is None else ranks)
        if len(set(addressed)) < len(addressed) or not set(addressed) <= set(range(self.world_size)):
            raise ValueError(f"ranks: {addressed}: expected different ranks from 0 to {self.world_size - 1}")
        return addressed

    def _join(self, deadline: float) -> None:
        order: dict[str, Any] = {"action": "announce", "port": self._port}
        if self._makes_group:
            order = {"action": "join", "port": self._port, "group": self._generation, "device": self._device}
        self._exchange(list(range(self.world_size)), order, deadline)

    def _renew(self) -> None:
        """Make a new process group, since collectives may be unfinished in the old one."""
        self._generation += 1
        with suppress(WorkerError):  # this closes the pool; the caller raises the original error
            self._join(time.monotonic() + RENEWAL)

    def _exchange(self, ranks: list[int], order: dict[str, Any], deadline: float, report: Report = silent) -> list[Any]:
        """Send ``ranks`` an order and return their results."""
        line = json.dumps(order).encode() + b"\n"
        self._limit = deadline - time.monotonic()
        replies: dict[int, dict[str, Any]] = {}
        try:
            self._send(ranks, line, deadline)
            self._gather(ranks, replies, deadline, report)
        except BaseException:
            # Close: an unread reply would be taken for the answer to the next order.
            self.close()
            raise
        failed = [rank for rank, reply in replies.items() if "error" in reply]
        if not failed:
            return [replies[rank]["result"] for rank in ranks]
        if order["action"] != "call" or not self._makes_group:
            self.close()
        else:
            self._renew()
        raise self._raised(failed, replies)

    def _send(self, ranks: list[int], line: bytes, deadline: float) -> None:
        for rank in ranks:
            try:
                self._workers[rank].send(line, deadline)
            except EOFError:
                raise self._died(rank, {}) from None
            except TimeoutError:
                raise self._silent([rank], {}) from None

    def _gather(self, ranks: list[int], replies: dict[int, dict[str, Any]], deadline: float, report: Report) -> None:
        """Add each rank's reply to ``replies``, in order of arrival."""
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                selector.register(self._workers[rank], selectors.EVENT_READ)
            while waiting := [rank for rank in ranks if rank not in replies]:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise self._silent(waiting, replies)
                ready = selector.select(min(POLL, remaining))
                for key, _ in ready:
                    worker: WorkerProcess = key.fileobj  # type: ignore[assignment]
                    try:
                        reply = worker.receive(report)
                    except EOFError:
                        raise self._died(worker.rank, replies) from None
                    if reply is None:
                        continue
                    replies[worker.rank] = reply
                    selector.unregister(worker)
                    if "error" in reply:
                        deadline = min(deadline, time.monotonic() + GRACE)
                if not ready:
                    self._check_alive(replies)

    def _check_alive(self, replies: dict[int, dict[str, Any]]) -> None:
        for worker in self._workers:
            if not worker.alive():
                raise self._died(worker.rank, replies)

    def _raised(self, failed: list[int], replies: dict[int, dict[str, Any]]) -> WorkerError:
        errors = {rank: replies[rank]["error"] for rank in failed}
        return wrong_input(errors, replies) or self._told(failed, replies)

    def _told(self, failed: list[int], replies: dict[int, dict[str, Any]]) -> WorkerError:
        first = failed[0]
        error = replies[first]["error"]
        message = f"rank {first} raised {error['type']}: {error['message']}{_others(failed[1:], replies)}"
        text = f"{message}\n\n{error['traceback']}{self._outputs([first])}"
        return WorkerError(text, first, error["traceback"], error["type"], error["message"])

    def _died(self, rank: int, replies: dict[int, dict[str, Any]]) -> WorkerError:
        failed = [other for other, reply in replies.items() if "error" in reply]
        message = f"rank {rank} died ({self._workers[rank].fate()}); the pool is closed"
        return WorkerError(f"{message}{_others(failed, replies)}{self._outputs([rank])}", rank)

    def _silent(self, ranks: list[int], replies: dict[int, dict[str, Any]]) -> WorkerError:
        for rank in ranks:
            self._workers[rank].dump_stacks()
        time.sleep(STACK_DUMP)
        failed = [rank for rank, reply in replies.items() if "error" in reply]
        names = _rank_names(ranks)
        if not failed:
            message = f"no answer from {names} within {round(self._limit, 1):g} s; the pool is closed"
            return WorkerError(message + self._outputs(ranks), ranks[0])
        cause = self._told(failed, replies)
        message = f"{cause}\n\nno answer from {names} within {GRACE:g} s after that error; the pool is closed"
        return WorkerError(message + self._outputs(ranks), cause.rank, cause.traceback, cause.kind, cause.reason)

    def _outputs(self, ranks: list[int]) -> str:
        for rank in ranks:
            self._workers[rank].output.drain(DRAIN)
        texts = [(rank, self._workers[rank].output.text()) for rank in ranks]
        return "".join(f"\n\n--- last output of rank {rank} ---\n{text}" for rank, text in texts if text)


def _end_all(workers: list[WorkerProcess], owner: int) -> None:
    if os.getpid() != owner:  # a forked copy of this process must not end its parent's workers
        return
    for worker in workers:
        worker.prepare_end()
    for worker in workers:
        worker.end()


def _worker_command(timeout: float, threads: int, scheduling: str | None) -> list[str]:
    command = [sys.executable, "-m", "lightning_autosync.measure.workers.worker"]
    command += ["--timeout", str(timeout), "--threads", str(threads)]
    if scheduling == "batch":
        command.append("--batch")
    # PR_SET_PDEATHSIG fires when the thread that started the child ends. A pool made in a short-lived thread would lose
    # its workers, so there only the end of the orders pipe ends them.
    if threading.current_thread() is threading.main_thread():
        command.append("--end-with-parent")
    return command


def _common_environment(threads: int, extra_paths: Sequence[str | os.PathLike[str]]) -> dict[str, str]:
    """Common environment of all workers: the import path of this process, and thread counts."""
    paths = [*(os.fspath(path) for path in extra_paths), *(path or os.getcwd() for path in sys.path)]
    return {
        "PYTHONPATH": os.pathsep.join(str(Path(path).absolute()) for path in paths),
        "PYTHONSAFEPATH": "1",  # do not import from the working directory unless this process does
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
    }


def _others(failed: list[int], replies: dict[int, dict[str, Any]]) -> str:
    errors = [(rank, replies[rank]["error"]) for rank in failed]
    return "".join(f"\nrank {rank} raised {error['type']}: {error['message']}" for rank, error in errors)


def _rank_names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
