"""The soak, in short: two faults, and the log that it goes on with."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import forked
import pytest
import soak as soaks
from soak_calls import EXCEPTION, TUNING

ROOT = Path(__file__).parent.parent.parent


def soak(log: Path, *line: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.soak", f"log={log}", *line]
    return forked.run(command, cwd=ROOT, capture_output=True)


class SlowJob:
    """A job of two ranks that makes ten steps, and then ends or hangs.

    Args:
        pace: seconds of a step.
        ends: whether it ends after them.
    """

    def __init__(self, pace: float, ends: bool) -> None:
        self._begin, self._pace, self._ends = time.monotonic(), pace, ends

    def count(self, key: str) -> int:
        return self._made if key == "steps" else 2

    @property
    def _made(self) -> int:
        return min(10, int((time.monotonic() - self._begin) / self._pace))

    def result(self, rank: int, timeout: float) -> dict[str, str]:
        time.sleep(timeout)
        if self._ends and self._made == 10:
            return {"error": ""}
        raise TimeoutError


@pytest.mark.parametrize(("pace", "ends", "hangs"), [(0.1, True, []), (0.01, False, [0, 1])])
def test_a_slow_job_that_makes_steps_is_no_hang(
    pace: float, ends: bool, hangs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soaks, "BOUND", 0.5)
    fault = soaks.Fault(0, EXCEPTION, TUNING, size=2, rank=0, step=0, after=0.0, seconds=0.0, seed=0)
    job: Any = SlowJob(pace, ends)
    assert soaks.Soak()._follow(job, fault)[1] == hangs


@pytest.mark.timeout(600)
def test_a_few_faults_and_nothing_that_counts_against_a_job(tmp_path: Path) -> None:
    log = tmp_path / "soak.jsonl"
    line = "faults=2", "modes=native,partial reduce"
    finished, again = soak(log, *line), soak(log, *line)
    assert finished.returncode == again.returncode == 0, finished.stdout + finished.stderr[-2000:]
    assert "2 faults in" in finished.stdout
    assert re.search(r"^0 faults in \d+ s", again.stdout, re.MULTILINE), again.stdout
    header, *lines = (json.loads(line) for line in log.read_text().splitlines())
    assert header["format"] == "autosync-soak/1"
    assert sorted(line["fault"]["number"] for line in lines) == [*range(2)]
    assert [line for line in lines if line["hangs"] or line["differs"] or line["lost"] or line["unnamed"]] == []


def test_a_word_that_it_does_not_know_is_refused(tmp_path: Path) -> None:
    finished = soak(tmp_path / "soak.jsonl", "kinds=flood")
    assert finished.returncode == 1
    assert "flood: allowed: kill, stop, " in finished.stderr
