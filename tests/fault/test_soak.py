"""The soak, in short: two faults, and the log that it goes on with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).parent.parent.parent


def soak(log: Path, *line: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.soak", f"log={log}", *line]
    return forked.run(command, cwd=ROOT, capture_output=True)


@pytest.mark.timeout(600)
def test_a_few_faults_and_nothing_that_counts_against_a_job(tmp_path: Path) -> None:
    log = tmp_path / "soak.jsonl"
    line = "faults=2", "modes=native,partial reduce"
    finished, again = soak(log, *line), soak(log, *line)
    assert finished.returncode == again.returncode == 0, finished.stdout + finished.stderr[-2000:]
    assert "2 faults in" in finished.stdout
    assert "0 faults in 0 s" in again.stdout
    header, *lines = (json.loads(line) for line in log.read_text().splitlines())
    assert header["format"] == "autosync-soak/1"
    assert sorted(line["fault"]["number"] for line in lines) == [*range(2)]
    assert [line for line in lines if line["hangs"] or line["differs"] or line["lost"] or line["unnamed"]] == []


def test_a_word_that_it_does_not_know_is_refused(tmp_path: Path) -> None:
    finished = soak(tmp_path / "soak.jsonl", "kinds=flood")
    assert finished.returncode == 1
    assert "flood: allowed: kill, stop, " in finished.stderr
