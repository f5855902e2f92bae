"""A pytest plugin that runs tests in forks of one process: ``pytest -p tests.fork_workers --workers 3``.

The process imports and collects all tests once. Then it forks workers, which take groups of tests as they become free.
The workers of pytest-xdist would each import and collect for themselves, which takes most of a minute of a core here.
Tests of one file run in one worker. The marker ``together(NAME)`` keeps the tests of several files in one worker.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

PARTING = 10.0
"""Seconds that a worker has for tidying up when the run is interrupted."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="run tests in so many forks of this process")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Without Python's collector of garbage, which would visit hundreds of thousands of objects again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


pytest_load_initial_conftests = pytest_collection
"""They import torch and Lightning."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    option = session.config.option
    if not option.workers or option.collectonly or option.usepdb or session.testsfailed:
        return None  # pytest's own loop
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if threads:
        raise pytest.UsageError(f"--workers: tests start threads when they are imported: {', '.join(threads)}")
    Run(session).run()
    return True


@dataclass
class Worker:
    process: ForkProcess
    connection: Connection
    pending: list[int] = field(default_factory=list)
    """Places of its tests that have not ended; the first may run."""
    last: int = 0


class Run:
    """Forks the workers, gives them groups of tests, and reports what they send."""

    def __init__(self, session: pytest.Session) -> None:
        self.session, self.config, self.hook = session, session.config, session.config.hook
        self.queue = deque(groups(session.items))
        self.workers: list[Worker] = []
        self._base: Path = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self._forked = 0

    def run(self) -> None:
        gc.collect()
        gc.freeze()  # collections in workers neither visit nor copy what is there already
        try:
            for _ in range(min(self.config.option.workers, len(self.queue))):
                self._fork()
            while self.workers:
                # If a process of a test holds the connection of a worker that died, only a look at it tells that.
                ready = wait([worker.connection for worker in self.workers], timeout=1.0)
                for worker in [*self.workers]:
                    if worker.connection in ready or not worker.process.is_alive():
                        self._hear(worker)
        finally:
            for worker in self.workers:
                os.kill(worker.process.pid or 0, signal.SIGINT)
            for worker in self.workers:
                end(worker.process)

    def _fork(self) -> None:
        self.config.get_terminal_writer().flush()  # else the fork prints it once more
        self._forked += 1
        ours, theirs = Pipe()
        inherited = [ours, *(worker.connection for worker in self.workers)]
        child = Child(self.session, theirs, inherited, self._base / f"worker{self._forked}")
        process = multiprocessing.get_context("fork").Process(target=child.work)
        process.start()
        theirs.close()
        self.workers.append(Worker(process, ours))

    def _hear(self, worker: Worker) -> None:
        """Take all that a worker has sent."""
        ended = not worker.process.is_alive()  # before the last message is read
        try:
            while worker.connection.poll():
                self._take(worker, *worker.connection.recv())
                if self.session.shouldfail:
                    raise self.session.Failed(self.session.shouldfail)
                if self.session.shouldstop:
                    raise self.session.Interrupted(self.session.shouldstop)
        except (EOFError, ConnectionError):
            ended = True
        if ended:
            self._bury(worker)

    def _take(self, worker: Worker, kind: str, content: Any = None) -> None:
        if kind == "asks":
            group = self.queue.popleft() if self.queue else []
            worker.pending += group
            worker.connection.send(group)
        elif kind == "report":
            report = self.hook.pytest_report_from_serializable(config=self.config, data=content)
            self.hook.pytest_runtest_logreport(report=report)
        elif kind == "warning":
            self.hook.pytest_warning_recorded.call_historic(kwargs=restored(*content))
        else:
            item = self.session.items[content]
            if kind == "starts":
                worker.last = content
                self.hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
            else:
                worker.pending.remove(content)
                self.hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _bury(self, worker: Worker) -> None:
        """Report what a worker that died was at, and let another one run its other tests."""
        self.workers.remove(worker)
        status = end(worker.process)
        worker.connection.close()
        if status == 0 and not worker.pending:
            return
        item = self.session.items[(worker.pending or [worker.last])[0]]
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        told = f"The worker process of this test {how}."
        self.hook.pytest_runtest_logreport(
            report=pytest.TestReport(item.nodeid, item.location, {}, "failed", told, "call")
        )
        if worker.pending[1:]:
            self.queue.appendleft(worker.pending[1:])
        if self.queue:
            self._fork()


class Child:
    """A plugin of the forked process that runs tests and sends reports."""

    def __init__(
        self, session: pytest.Session, connection: Connection, inherited: list[Connection], directory: Path
    ) -> None:
        self._session, self._connection, self._hook = session, connection, session.config.hook
        self._inherited, self._directory = inherited, directory
        self._registered = False

    def work(self) -> None:
        for connection in self._inherited:
            connection.close()  # else no worker would see that the process ends which has forked it
        # Shells let jobs in their background ignore Ctrl-C, which is also what ends a worker when the run ends early.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            self._separate()
            self._run_groups()
        except (KeyboardInterrupt, EOFError, ConnectionError):  # the run ends
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        finally:
            self._session._setupstate.teardown_exact(None)

    def _separate(self) -> None:
        """Have own files where the other workers have theirs."""
        manager = self._session.config.pluginmanager
        capture: Any = manager.getplugin("capturemanager")
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
        self._directory.mkdir()
        self._session.config._tmp_path_factory._basetemp = self._directory  # type: ignore[attr-defined]
        manager.register(self)  # which tells this plugin the warnings of workers that died
        self._registered = True

    def _run_groups(self) -> None:
        """Fixtures of the session end with each group: processes that no later test needs would go on polling."""
        while group := self._next_group():
            for place, following in pairwise([*group, None]):
                self._run(place, following)

    def _next_group(self) -> list[int]:
        self._connection.send(("asks",))
        group: list[int] = self._connection.recv()
        return group

    def _run(self, place: int, following: int | None) -> None:
        items = self._session.items
        self._connection.send(("starts", place))
        nextitem = None if following is None else items[following]
        self._hook.pytest_runtest_protocol(item=items[place], nextitem=nextitem)
        self._connection.send(("ends", place))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        for report in runtestprotocol(item, log=False, nextitem=nextitem):
            data = self._hook.pytest_report_to_serializable(config=item.config, report=report)
            self._connection.send(("report", data))
        return True

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str, nodeid: str) -> None:
        one = warning_message
        if when == "runtest" and self._registered:  # the others were recorded before the fork
            shown = (str(one.message), one.category.__name__, one.filename, one.lineno)
            self._connection.send(("warning", (nodeid, *shown)))


def end(process: ForkProcess) -> int:
    """Wait until the process has ended; the negative number of the signal that ended it, or its status."""
    process.join(PARTING)
    process.kill()
    process.join()
    return process.exitcode or 0


def groups(items: list[pytest.Item]) -> list[list[int]]:
    """Places of the tests that one worker runs, those first that take longest, so that workers end at about one time.

    Groups of many files take longest. Files in deep folders are about single parts of the package, and are short.
    """
    found: dict[str, list[int]] = {}
    for place, item in enumerate(items):
        marker = item.get_closest_marker("together")
        found.setdefault(marker.args[0] if marker else str(item.path), []).append(place)

    def rank(group: list[int]) -> tuple[int, int]:
        paths = {items[place].path for place in group}
        return -len(paths), min(len(path.parts) for path in paths)

    return sorted(found.values(), key=rank)


def restored(nodeid: str, text: str, category: str, filename: str, line: int) -> dict[str, Any]:
    """A warning of a worker, whose class need not be known here."""
    kind = type(category, (Warning,), {})
    message = warnings.WarningMessage(text, kind, filename, line)  # type: ignore[arg-type]
    return {"warning_message": message, "when": "runtest", "nodeid": nodeid, "location": None}
