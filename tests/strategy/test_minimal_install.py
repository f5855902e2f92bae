"""Training works without the packages of all extras, and says what it lacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "minimal_job.py"


@pytest.mark.slow  # `make minimal` runs the job too
def test_two_processes_train_without_any_optional_package(tmp_path: Path) -> None:
    outside = {name: value for name, value in os.environ.items() if not name.endswith("RANK")}
    result = tmp_path / "told.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(result)],
        env={**outside, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(result.read_text())
    assert "sums in shared memory" in told["on one host"]["reason"]
    searched = told["on two hosts"]
    install = 'pip install ".[tune]" in a checkout of lightning-autosync'
    lacks = f"The simulation of plans needs numba, which is not installed: {install}"
    assert searched["reason"].endswith(f"These times are from formulas. {lacks}")
    assert lacks in done.stderr + done.stdout
    # DDP's plan, which is as good as any other between two ranks, and the one that suits the links.
    assert [name for name, _ in searched["candidates"]] == ["all_reduce", "byteps"]
    assert all(seconds > 0 for _, seconds in searched["candidates"])
