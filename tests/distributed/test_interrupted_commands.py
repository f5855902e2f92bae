"""A Ctrl-C or SIGTERM at any moment of a command: no traceback, no process, folder or namespace left behind."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from lightning_autosync.measure.emulation import netns
from lightning_autosync.measure.workers import LaunchError
from lightning_autosync.plan import SyncPlan

try:
    netns.require_namespaces()
    UNABLE = ""
except LaunchError as error:
    UNABLE = str(error)

RUN = "import sys; from lightning_autosync.cli import main; sys.argv[0] = 'autosync'; main()"
MARK = "AUTOSYNC_TEST_MARK"
ENDED = {signal.SIGINT: (130, -signal.SIGINT), signal.SIGTERM: (-signal.SIGTERM,)}
"""A shell has 130 for both of a Ctrl-C; the second is that of one that comes when Python itself hears none any more."""
FLAT = ("model=flat", "model.mib=0.01", "ddp=short", "steps=1")
LINES: dict[str, tuple[str, ...]] = {
    "bench": ("bench", *FLAT, "rounds=100000"),
    "tune": (
        "tune",
        *FLAT,
        "search=random",
        "search.budget=100000",
        "trial.warm_up=1",
        "trial.min_steps=2",
        "trial.max_steps=2",
    ),
    "probe": ("probe", "ranks=2", "window=30"),
    "train": ("train", "ranks=2", "trainer.max_epochs=1000", "trainer.accelerator=cpu"),
    "sweep": ("bench", "-m", *FLAT, "rounds=3,100000", "hydra.sweep.dir=run"),
    "emulated": ("bench", *FLAT, "rounds=100000", "launch=emulated", "cluster=four_equal"),
}  # fmt: skip


def moments(count: int, longest: float) -> list[float]:
    """Seconds after a command's start, early ones more often."""
    drawn = random.Random(0)
    return [longest * drawn.random() ** 1.5 for _ in range(count)]


def marked(mark: str) -> set[int]:
    """Processes that a command started, by the environment that they have from it."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
    return found


@pytest.fixture
def mark(tmp_path) -> Iterator[str]:
    yield str(tmp_path)
    for pid in marked(str(tmp_path)):
        os.kill(pid, signal.SIGKILL)


def interrupted(
    line: str, folder: Path, mark: str, after: float, gap: float | None = None, number: signal.Signals = signal.SIGINT
) -> str:
    """Start a command, and send a signal ``after`` seconds from when it hears one, and another one ``gap`` later."""
    surroundings = {**os.environ, MARK: mark, "TMPDIR": str(folder)}
    words = [*LINES[line], *([] if line == "sweep" else ["hydra.run.dir=run"])]
    running = subprocess.Popen(
        [sys.executable, "-c", RUN, *words], cwd=folder, env=surroundings, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    own = {name for name in netns.list_namespaces() if name.startswith(f"as{running.pid}-")}
    assert not own
    _wait_until_heard(running.pid)
    time.sleep(after)
    for pause in (0.0, gap):
        if pause is not None:
            time.sleep(pause)
            running.send_signal(number)
    printed, errors = running.communicate(timeout=60)
    assert running.returncode in ENDED[number], (after, gap, printed[-300:], errors[-1500:])
    assert "Traceback" not in errors, (after, gap, errors)
    _wait_for(lambda: not marked(mark), f"processes left after {after:.2f} s")
    _wait_for(
        lambda: not any(name.startswith(f"as{running.pid}-") for name in netns.list_namespaces()),
        f"namespaces left after {after:.2f} s",
    )
    assert [path.name for path in folder.glob("autosync-*")] == []
    return printed


def _wait_until_heard(pid: int) -> None:
    """Wait until the interpreter has come to the package, which it says by ignoring no signal in a way of its own."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            if "yaml" in maps or "numpy" in maps or "pydantic" in maps:
                return
        time.sleep(0.002)
    raise AssertionError("it does not start")


def _wait_for(done, what: str) -> None:
    deadline = time.monotonic() + 15
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


NEEDS_ROOT = [pytest.mark.root, pytest.mark.skipif(bool(UNABLE), reason=UNABLE)]


def _lines() -> list[object]:
    return [pytest.param(line, marks=NEEDS_ROOT if line == "emulated" else []) for line in LINES]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("line", "after"),
    [
        ("bench", 0.3),
        pytest.param("tune", 4.0, marks=pytest.mark.slow),
        pytest.param("emulated", 5.0, marks=[*NEEDS_ROOT, pytest.mark.slow]),
    ],
)
def test_a_signal_at_some_moment(line, after, number, tmp_path, mark):
    interrupted(line, tmp_path, mark, after, number=number)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("line", _lines())
def test_a_ctrl_c_at_many_moments(line, tmp_path, mark):
    for after in moments(60, 14.0):
        interrupted(line, tmp_path, mark, after)


@pytest.mark.slow
@pytest.mark.parametrize("gap", [0.0, 0.3])
def test_twice_in_a_row(gap, tmp_path, mark):
    interrupted("bench", tmp_path, mark, 6.0, gap)


@pytest.mark.slow
@pytest.mark.parametrize("gap", [0.0, 0.02, 0.1, 0.2, 0.4])
def test_what_was_measured_is_kept_even_so(gap, tmp_path, mark):
    """The second one comes while the files are written."""
    interrupted_after_trials(tmp_path, mark, gap)
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found["interrupted"]
    assert SyncPlan.load(tmp_path / "run" / "plan.yaml").to_dict() == found["best"]["plan"]


def interrupted_after_trials(folder: Path, mark: str, gap: float) -> None:
    running = subprocess.Popen(
        [sys.executable, "-c", RUN, *LINES["tune"], "hydra.run.dir=run"], cwd=folder, env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    journal = folder / "run" / "study.journal"
    _wait_for_trials(journal, running)
    running.send_signal(signal.SIGINT)
    time.sleep(gap)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode in ENDED[signal.SIGINT], errors[-1500:]
    assert "Traceback" not in errors


def _wait_for_trials(journal: Path, running: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and running.poll() is None:
        if journal.exists() and journal.read_text().count('autosync:seconds"') >= 12:
            return
        time.sleep(0.1)
    raise AssertionError(f"not so many trials; exit status {running.poll()}")
