"""Processes that a test can kill, stop and cut off from each other, and seeded plans of such faults.

A test names a function ``module:function`` of a module on the tests' path. It runs in each process as
``function(store, rank, size, rejoin, **arguments)`` and returns JSON data. The store lives in the test's process, so
that it outlives every rank. Processes are forked by a server that has imported torch once: importing it takes seconds
of a core, which tests of many processes do not have.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import forked
import torch
import torch.distributed as dist
from ports import free_port

TESTS = Path(__file__).parent.parent
MODULES = [TESTS, TESTS / "fault", TESTS / "distributed"]
HOST = "127.0.0.1"

KILL, STOP, DROP, SLOW = "kill", "stop", "drop", "slow"
"""SIGKILL; SIGSTOP and, after a while, SIGCONT; one connection of the process is shut down by force; the kernel lets
the process send only `SLOW_RATE` for `SLOW_SECONDS`."""
SLOW_RATE = 100_000
"""Bytes a second on each connection of a slow rank."""
SLOW_SECONDS = 1.5
_MAX_PACING_RATE = 47
"""Linux's SO_MAX_PACING_RATE, which the ``socket`` module does not name."""


@dataclass(frozen=True)
class Fault:
    """What happens to whom, when (seconds after the plan's start), and for how long (STOP only)."""

    kind: str
    rank: int
    at: float
    seconds: float = 0.0


def draw_faults(
    seed: int,
    ranks: Sequence[int],
    count: int,
    span: float,
    *,
    kinds: Sequence[str] = (KILL, STOP, DROP),
    stops: tuple[float, float] = (0.1, 3.0),
) -> list[Fault]:
    """``count`` faults at random times within ``span`` seconds; a rank that was killed meets no further one."""
    drawn = random.Random(seed)
    alive, faults = list(ranks), []
    for at in sorted(drawn.uniform(0, span) for _ in range(count)):
        if not alive:
            break
        fault = Fault(drawn.choice(list(kinds)), drawn.choice(alive), at, drawn.uniform(*stops))
        faults.append(fault)
        if fault.kind == KILL:
            alive.remove(fault.rank)
    return faults


class Crew:
    """Processes of ranks ``0..size-1`` that run one function each; none outlives the ``with`` block."""

    def __init__(self, function: str, size: int, **arguments: Any) -> None:
        self._function, self.size, self._arguments = function, size, arguments
        self._processes: dict[int, ForkServerProcess] = {}
        self._answers: dict[int, Connection] = {}
        self._forks = forked.context()

    def __enter__(self) -> Crew:
        self._port = free_port()
        self._store = dist.TCPStore(HOST, self._port, is_master=True, wait_for_workers=False)
        for rank in range(self.size):
            self.start(rank)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank in self._processes:
            self._end(rank)

    def start(self, rank: int, *, rejoin: bool = False) -> None:
        """Start a rank, or start it again."""
        self._end(rank)
        answer, told = self._forks.Pipe(duplex=False)
        order = (self._function, self._port, rank, self.size, rejoin, self._arguments, told)
        self._processes[rank] = self._forks.Process(target=_main, args=order, daemon=True)
        self._processes[rank].start()
        told.close()
        self._answers[rank] = answer

    def wait_for(self, key: str, count: int, timeout: float = 90.0) -> None:
        """Wait until processes have called ``store.add(key, 1)`` ``count`` times."""
        deadline = time.monotonic() + timeout
        while self._store.add(key, 0) < count:
            assert time.monotonic() < deadline, (
                f"{key} was not reached {count} times in {timeout:g} s; processes that ended told {self._told()}"
            )
            time.sleep(0.01)

    def announce(self, key: str) -> None:
        """Let the processes know something: ``store.add(key, 0)`` becomes positive."""
        self._store.add(key, 1)

    def kill(self, rank: int) -> None:
        self._signal(rank, signal.SIGKILL)

    def stop(self, rank: int) -> None:
        self._signal(rank, signal.SIGSTOP)

    def terminate(self, rank: int) -> None:
        self._signal(rank, signal.SIGTERM)

    def go_on(self, rank: int) -> None:
        self._signal(rank, signal.SIGCONT)

    def alive(self, rank: int) -> bool:
        """Whether the rank's process is there, be it stopped."""
        return self._processes[rank].is_alive()

    def drop(self, rank: int) -> None:
        """Shut one connection of the rank's mesh down; its function must have called `drop_on_signal`."""
        self._signal(rank, signal.SIGUSR1)

    def slow(self, rank: int) -> None:
        """Slow the rank's mesh down for a while; its function must have called `slow_on_signal`."""
        self._signal(rank, signal.SIGUSR2)

    def count(self, key: str) -> int:
        """How often processes have called ``store.add(key, 1)``."""
        return self._store.add(key, 0)

    def text(self, key: str) -> str:
        """What a process has called ``store.set(key, ...)`` with."""
        return self._store.get(key).decode()

    def inject(self, faults: Iterable[Fault]) -> None:
        """Let the faults happen, each in its time; a stopped rank goes on before this returns."""
        begin = time.monotonic()
        events = [(fault.at, fault.kind, fault.rank) for fault in faults]
        events += [(fault.at + fault.seconds, "go_on", fault.rank) for fault in faults if fault.kind == STOP]
        for at, kind, rank in sorted(events):
            time.sleep(max(0.0, begin + at - time.monotonic()))
            getattr(self, kind)(rank)

    def result(self, rank: int, timeout: float) -> Any:
        """What the rank's function returned; None if it was killed.

        Raises:
            TimeoutError: it has not ended in ``timeout`` seconds.
        """
        if not self._answers[rank].poll(timeout):
            raise TimeoutError(f"rank {rank} has not ended in {timeout:g} s")
        try:
            return json.loads(self._answers[rank].recv_bytes())
        except EOFError:
            return None

    def results(self, timeout: float) -> dict[int, Any]:
        """What the ranks returned that were not killed, all within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        found = {rank: self.result(rank, max(0.1, deadline - time.monotonic())) for rank in range(self.size)}
        return {rank: value for rank, value in found.items() if value is not None}

    def _told(self) -> dict[int, bytes]:
        """What processes have returned by now."""
        told = {}
        for rank, answer in self._answers.items():
            with suppress(EOFError):
                if answer.poll():
                    told[rank] = answer.recv_bytes()
        return told

    def _signal(self, rank: int, number: signal.Signals) -> None:
        pid = self._processes[rank].pid
        assert pid is not None
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(pid, number)

    def _end(self, rank: int) -> None:
        """End a rank's process, if it has one; a stopped one too."""
        if rank in self._processes:
            self._processes[rank].kill()
            self._processes[rank].join()
            self._answers.pop(rank).close()


def drop_on_signal(mesh: Any, seed: int, store: dist.Store) -> None:
    """At SIGUSR1, shut down one connection of ``mesh`` without a word to anybody, and count that (`struck`)."""
    drawn = random.Random(seed)

    def cut(signum: int, frame: object) -> None:
        connections = _connections(mesh)
        drawn.shuffle(connections)
        _count(store, DROP, mesh.rank, any(_done(one.shutdown, socket.SHUT_RDWR) for one in connections))

    signal.signal(signal.SIGUSR1, cut)


def slow_on_signal(mesh: Any, store: dist.Store) -> None:
    """At SIGUSR2, let ``mesh`` send no faster than `SLOW_RATE` on any connection for `SLOW_SECONDS`; count that."""

    def pace(rate: int) -> bool:
        limit = socket.SOL_SOCKET, _MAX_PACING_RATE, struct.pack("@L", rate)
        return sum(_done(one.setsockopt, *limit) for one in _connections(mesh)) > 0

    def slow(signum: int, frame: object) -> None:
        _count(store, SLOW, mesh.rank, pace(SLOW_RATE))
        signal.setitimer(signal.ITIMER_REAL, SLOW_SECONDS)

    signal.signal(signal.SIGALRM, lambda signum, frame: pace(2**63))
    signal.signal(signal.SIGUSR2, slow)


def struck(kind: str, rank: int) -> str:
    """The store's counter of faults of a kind that met ``rank``, as drops and slow links do only where it has
    connections at that moment.
    """
    return f"{kind} struck {rank}"


def missed(kind: str, rank: int) -> str:
    """The counter of those that found nothing to meet."""
    return f"{kind} missed {rank}"


def _count(store: dist.Store, kind: str, rank: int, met: bool) -> None:
    store.add((struck if met else missed)(kind, rank), 1)


def _connections(mesh: Any) -> list[socket.socket]:
    """Those that are there just now."""
    sockets = [connection.sock for connection in list(mesh._loop._connections.by_rank.values())]
    return [one for one in sockets if one is not None]


def _done(call: Callable[..., object], *arguments: Any) -> bool:
    """Whether a call on a connection, which may go at any moment, went well."""
    try:
        call(*arguments)
    except OSError:
        return False
    return True


def _main(
    name: str, port: int, rank: int, size: int, rejoin: bool, arguments: dict[str, Any], told: Connection
) -> None:
    # A fault may come before the function is ready for it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    sys.path[:0] = [str(path) for path in MODULES]
    torch.set_num_threads(1)
    store = dist.TCPStore(HOST, port, is_master=False, timeout=timedelta(seconds=60))
    module, function = name.split(":")
    value = getattr(import_module(module), function)(store, rank, size, rejoin, **arguments)
    told.send_bytes(json.dumps(value).encode())
    # Not to be held up by what a fault left behind.
    os._exit(0)
