"""`autosync bench` for real: two ranks, a few rounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_autosync.bench.interleaving import run_bench
from lightning_autosync.bench.settings import Settings
from lightning_autosync.workers import WorkerError

RUN = "import sys; from lightning_autosync.cli import main; sys.argv[0] = 'autosync'; main()"


def autosync(directory: Path, *line: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN, "bench", *line]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> tuple[dict[str, Any], str]:
    """What one short run left, and what it printed."""
    directory = tmp_path_factory.mktemp("bench")
    sizes = ("model.tensors=8", "model.width=64", "model.batch=8", "rounds=2", "steps=3", "warm_up=2")
    finished = autosync(directory, "ddp=short", *sizes, "+contenders.star.builder=ps", "hydra.run.dir=run")
    assert finished.returncode == 0, finished.stderr
    assert (directory / "run" / "result.png").stat().st_size > 1000
    return json.loads((directory / "run" / "result.json").read_text()), finished.stdout


def test_every_contender_every_round_every_rank_every_step(found):
    document, printed = found
    assert list(document["contenders"]) == ["ddp", "ddp_view", "native", "star"]
    for name, contender in document["contenders"].items():
        rounds = contender["step_seconds_by_round_and_rank"]
        assert [[len(steps) for steps in ranks] for ranks in rounds] == [[3, 3], [3, 3]]
        assert all(seconds > 0 for ranks in rounds for steps in ranks for seconds in steps)
        assert name in printed


def test_all_contenders_compute_the_same_gradients(found):
    document, _ = found
    assert all(contender["gradient_deviation"] < 1e-5 for contender in document["contenders"].values())


@pytest.mark.skipif(sys.platform != "linux", reason="bytes are read from /proc")
def test_bytes_on_the_wire_are_those_of_an_all_reduce(found):
    """Two ranks send every gradient once, whether around a ring or to a server and back."""
    document, _ = found
    for contender in document["contenders"].values():
        assert contender["bytes_per_step_and_rank"] == pytest.approx(document["workload"]["bytes"], rel=0.25)


def test_too_short_a_run_says_so(found):
    document, printed = found
    assert not document["meets_protocol"]
    assert "too few" in printed


def test_row_wise_contenders_agree_with_dense_ones():
    settings = Settings.parse(
        {
            "model": {"kind": "recommender", "rows": 500, "width": 4, "batch": 16},
            "rounds": 1,
            "steps": 1,
            "warm_up": 1,
            "contenders": {
                "ddp_sparse": {"ddp": {}, "embeddings": "sparse"},
                "rows": {"builder": "all_reduce", "embeddings": "rows"},
                "sparse": {"builder": "parallax", "embeddings": "sparse"},
            },
        }
    )
    result = run_bench(settings)
    assert all(measurement.deviation < 1e-5 for measurement in result.measurements.values())


def test_a_worker_that_fails_is_told(monkeypatch):
    monkeypatch.setattr("lightning_autosync.bench.interleaving._WORKER", "lightning_autosync.nowhere")
    settings = Settings.parse({"model": {"kind": "flat", "mib": 0.1}})
    with pytest.raises(WorkerError, match=r"lightning_autosync\.nowhere"):
        run_bench(settings)
