"""Every way of starting ranks ends with the same weights."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import forked
import jobs
import pytest
from sweeps import sweep

SCRIPT = Path(__file__).parent / "launched.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
LAUNCHES = {
    "popen": ([], "autosync"),
    "spawn": ([], "autosync_spawn"),
    "fork": ([], "autosync_fork"),
    "torchrun": (TORCHRUN, "autosync_allreduce"),
}


@pytest.mark.parametrize("launch", sweep(["popen", "spawn", "fork", "torchrun"], ["fork"]))
def test_weights_are_those_of_ddp(duo, tmp_path, launch: str) -> None:
    options, strategy = LAUNCHES[launch]
    result = tmp_path / "weights.json"
    outside = {name: value for name, value in os.environ.items() if not name.endswith("RANK")}
    command = [sys.executable, *options, str(SCRIPT), strategy, str(result)]
    variables = {**outside, "OMP_NUM_THREADS": "1"}
    done = forked.run(command, env=variables, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "timed out" not in done.stderr  # torch's warnings while ranks wait for the last one
    expected = duo.run(jobs.weights, strategy="ddp")[0]
    assert json.loads(result.read_text()) == pytest.approx(expected, abs=1e-6)
