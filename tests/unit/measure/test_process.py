"""A worker process as its caller sees it: orders that do not fit into a pipe."""

from __future__ import annotations

import math
import os
import select
from pathlib import Path
from typing import Any

import pytest

from lightning_autosync.measure.workers import process
from lightning_autosync.measure.workers.process import WorkerProcess


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path


def reader(gate: Path) -> WorkerProcess:
    """Takes nothing from its pipe until somebody writes to the gate."""
    return WorkerProcess(0, ["sh", "-c", f"cat {gate} > /dev/null; cat > /dev/null"], dict(os.environ))


def test_a_large_order_without_a_limit_of_time_waits_for_the_worker(gate: Path, monkeypatch: Any) -> None:
    waits = []

    def wait(*arguments: Any) -> Any:
        if not waits:
            gate.write_text("go")
        waits.append(arguments[3])
        return select.select(*arguments)

    monkeypatch.setattr(process, "select", type("select", (), {"select": staticmethod(wait)}))
    worker = reader(gate)
    try:
        worker.send(b"x" * 300_000 + b"\n", math.inf)
    finally:
        worker.end()
    assert waits
    assert set(waits) == {None}


def test_a_worker_that_takes_no_order_is_told_in_time(gate: Path) -> None:
    worker = reader(gate)
    try:
        with pytest.raises(TimeoutError):
            worker.send(b"x" * 300_000 + b"\n", 0.0)
    finally:
        worker.end()


@pytest.mark.parametrize(("parting", "status"), [(20.0, 7), (0.0, -9)])
def test_only_a_command_with_a_worker_elsewhere_is_asked_to_end(parting: float, status: int) -> None:
    """Like srun, which ends its task when it gets SIGTERM, and leaves it behind when it is killed."""
    command = ["sh", "-c", """trap 'sleep 0.2; exit 7' TERM; echo '{"result": 0}'; while :; do sleep 0.05; done"""]
    worker = WorkerProcess(0, command, dict(os.environ), parting=parting)
    while worker.receive() is None:  # the trap is set now
        pass
    worker.prepare_end()
    worker.end()
    assert worker._process.returncode == status
