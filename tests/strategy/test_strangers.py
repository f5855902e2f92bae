"""Live jobs among strangers: nobody is expelled, nothing ends, and weights are those of a job that is left alone."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import stranger_jobs
from strangers import KINDS, SECRET, Address, listening, visit
from test_serve_verb import start

from lightning_autosync.measure.workers import WorkerPool

RANKS, EPOCHS, STEPS = 3, 2, 8
AT_ONCE = 48
"""Strangers at the same time."""


@pytest.fixture(scope="module")
def trio() -> Iterator[WorkerPool]:
    paths = [Path(__file__).parent, Path(__file__).parents[1]]
    environment = {"AUTOSYNC_SECRET": SECRET.decode()}
    with WorkerPool(RANKS, timeout=300.0, extra_paths=paths, environment=environment, scheduling="batch") as workers:
        yield workers


class Storm:
    """Strangers that come to processes' listeners, of all kinds in turn, as soon as there are any.

    Args:
        pids: the processes.
        strangers: how many come.
        progress: a file that is told how many have.
    """

    def __init__(self, pids: list[int], strangers: int, progress: Path) -> None:
        self._pids, self._left, self._progress = pids, strangers, progress
        self._changing = threading.Lock()
        self._over = threading.Event()
        self._targets: list[Address] = []
        self.seen: set[Address] = set()
        self.kinds: Counter[str] = Counter()
        self.places: Counter[Address] = Counter()
        progress.write_text("0")
        self._pool = ThreadPoolExecutor(AT_ONCE + 1)
        self._pool.submit(self._look)
        for seed in range(AT_ONCE):
            self._pool.submit(self._come, random.Random(seed))

    def end(self) -> None:
        self._over.set()
        self._pool.shutdown()

    @property
    def come(self) -> int:
        return sum(self.kinds.values())

    def _look(self) -> None:
        while not self._over.is_set():
            self._targets = sorted(listening(self._pids))
            self.seen |= set(self._targets)
            with self._changing:
                aside = self._progress.with_suffix(".new")
                aside.write_text(str(self.come))
                aside.replace(self._progress)
            time.sleep(0.02)

    def _come(self, drawn: random.Random) -> None:
        while self._left > 0 and not self._over.is_set():
            if not self._targets:
                time.sleep(0.01)
                continue
            address, kind = drawn.choice(self._targets), drawn.choice(list(KINDS))
            if visit(address, kind):
                with self._changing:
                    self._left -= 1
                    self.kinds[kind] += 1
                    self.places[address] += 1


def run(pool: WorkerPool, kind: str, strangers: int, folder: Path) -> tuple[list[dict[str, Any]], Storm]:
    """A job of a kind among so many strangers: what its ranks found, and the storm."""
    folder.mkdir()
    progress, port, servers = folder / "progress", 0, []
    if kind == "servers":
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        servers = [start(folder, host="127.0.0.1", port=port, rank=RANKS, size=RANKS + 1, timeout=120)]
    storm = Storm([*pool.pids, *(server.pid for server in servers)], strangers, progress)
    try:
        job = {"kind": kind, "progress": str(progress), "strangers": strangers, "port": port}
        found = pool.run(stranger_jobs.train, epochs=EPOCHS, steps=STEPS, **job)
        for server in servers:
            assert server.wait(60.0) == 0
    finally:
        storm.end()
        for server in servers:
            server.kill()
            server.wait()
    return found, storm


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["exact", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("partial reduce", "servers"))]
)
@pytest.mark.parametrize("strangers", [300, pytest.param(15_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_strangers_change_nothing(
    trio: WorkerPool, kind: str, strangers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOSYNC_SECRET", SECRET.decode())
    alone, _ = run(trio, kind, 0, tmp_path / "alone")
    begun = time.monotonic()
    among, storm = run(trio, kind, strangers, tmp_path / "among")
    took = time.monotonic() - begun
    print(f"{kind}: {storm.come} strangers in {took:.0f} s, {dict(storm.kinds)}, at {dict(storm.places)}")
    assert storm.come >= strangers
    assert [each["steps"] for each in among] == [STEPS * EPOCHS] * RANKS
    assert len({each["digest"] for each in among}) == 1
    assert among == alone
    # What listens does so at the cluster's address only.
    assert {host for host, _ in storm.seen} == {"127.0.0.1"}
