"""`autosync bench` for real: two ranks, a few rounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench_modules
import forked
import pytest
import torch

from lightning_autosync.measure import conditions
from lightning_autosync.measure.bench.preparation import prepare
from lightning_autosync.measure.bench.result import BenchDocument, BenchResult
from lightning_autosync.measure.bench.run import play, run_bench
from lightning_autosync.measure.bench.settings import BenchSettings
from lightning_autosync.measure.session import MeasurementSession
from lightning_autosync.measure.workers import WorkerError

OVERLAP = ("+contenders.overlap.builder=ps", "+contenders.overlap.overlap=true")
RUN = "import sys; from lightning_autosync.cli import main; sys.argv[0] = 'autosync'; main()"


def autosync(directory: Path, *line: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN, "bench", *line]
    return forked.run(command, cwd=directory, capture_output=True, timeout=120)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> tuple[dict[str, Any], str]:
    """What one short run left, and what it printed."""
    directory = tmp_path_factory.mktemp("bench")
    sizes = ("model.tensors=8", "model.width=64", "model.batch=8", "rounds=2", "steps=3", "warm_up=2")
    finished = autosync(directory, "ddp=short", *sizes, "+contenders.star.builder=ps", *OVERLAP, "hydra.run.dir=run")
    assert finished.returncode == 0, finished.stderr
    assert (directory / "run" / "result.png").stat().st_size > 1000
    document = json.loads((directory / "run" / "result.json").read_text())
    assert BenchDocument.read(directory / "run").to_dict() == document
    return document, finished.stdout


@pytest.mark.slow
def test_every_contender_every_round_every_rank_every_step(found):
    document, printed = found
    names = ["ddp", "ddp_static", "ddp_view", "ddp_view_static", "native", "star", "overlap"]
    assert list(document["contenders"]) == names
    for name, contender in document["contenders"].items():
        rounds = contender["step_seconds_by_round_and_rank"]
        assert [[len(steps) for steps in ranks] for ranks in rounds] == [[3, 3], [3, 3]]
        assert all(seconds > 0 for ranks in rounds for steps in ranks for seconds in steps)
        assert name in printed


def test_all_contenders_compute_the_same_gradients(found):
    document, _ = found
    assert all(contender["gradient_deviation"] < 1e-5 for contender in document["contenders"].values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_missing_is_named(tmp_path: Path) -> None:
    finished = autosync(tmp_path, "ddp=short", "device=cuda", "hydra.run.dir=run")
    assert finished.returncode != 0
    assert "device: cuda: host " in finished.stderr
    assert "has no usable GPU (torch " in finished.stderr
    assert "Traceback" not in finished.stderr


def test_overlap_needs_an_optimizer() -> None:
    model = {"kind": "layers", "tensors": 4, "width": 8, "batch": 2, "learning_rate": None}
    settings = {"model": model, "warm_up": 1, "contenders": {"late": {"builder": "all_reduce", "overlap": True}}}
    with pytest.raises(WorkerError, match="overlap: the model has no optimizer"):
        run_bench(BenchSettings.parse(settings))


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
    settings = BenchSettings.parse(
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
    told: list[tuple[int, int]] = []
    result = run_bench(settings, report=lambda done, total, text: told.append((done, total)))
    assert all(measurement.deviation < 1e-5 for measurement in result.measurements.values())
    assert told == [(done, len(result.measurements)) for done in range(1, len(result.measurements) + 1)]


def test_buffers_follow_and_random_parts_are_the_same_in_every_contender() -> None:
    own = {"kind": "imported", "_target_": "bench_modules.Normalized", "data": {"_target_": "bench_modules.batches"}}
    short = {"rounds": 2, "steps": 2, "warm_up": 1, "ranks": 2}
    settings = BenchSettings.parse({"model": own, **short, "contenders": {"star": {"builder": "ps"}}})
    kept: list[int] = []
    preparation = prepare(settings)
    with MeasurementSession(preparation.cluster, settings.launch, settings.timeout) as session:
        result = play(settings, preparation, session, keep=lambda one: kept.append(one.document().rounds))
        for ddp, star in session.run(bench_modules.running_means, names=["ddp", "star"]):
            assert star == pytest.approx(ddp, abs=5e-4)  # what is dropped at random differs
    assert all(measurement.deviation < 1e-5 for measurement in result.measurements.values())
    assert kept == [1]


@pytest.fixture(scope="module")
def paced() -> BenchResult:
    """A short run under paced compute: every hook beside dense and row-wise plans."""
    model = {"kind": "paced", "catalogue": "ncf", "scale": 0.0005, "arguments": {"batch_size": 64}, "compute": "60 ms"}
    hooks = {
        "fp16": {"ddp": {"hook": "fp16"}},
        "bf16": {"ddp": {"hook": "bf16"}},
        "powersgd": {"ddp": {"hook": "powersgd", "bucket_cap_mb": 100}},
        "post_local": {"ddp": {"hook": "post_local_sgd", "period": 2}},
    }
    plans = {"rows": {"builder": "all_reduce", "embeddings": "rows"}, "star": {"builder": "byteps"}}
    sparse = {"ddp_sparse": {"ddp": {}, "embeddings": "sparse"}, "sparse": {"builder": "ps", "embeddings": "sparse"}}
    sizes = {"rounds": 1, "steps": 4, "warm_up": 3, "ddp": {"static_graph": [False, True]}}
    return run_bench(BenchSettings.parse({"model": model, **sizes, "contenders": {**hooks, **plans, **sparse}}))


def test_paced_steps_last_as_long_as_told(paced):
    assert all(measurement.median >= 0.059 for measurement in paced.measurements.values())
    assert paced.document().emulated == {"links": False, "compute": True}


def test_paced_gradients_are_the_mean_over_ranks_in_every_exact_contender(paced):
    for name, measurement in paced.measurements.items():
        if paced.classes[name] == "exact":
            assert measurement.deviation < 1e-6
    assert 0 < paced.measurements["bf16"].deviation < 0.01
    assert 0 < paced.measurements["fp16"].deviation < 0.001


@pytest.mark.skipif(sys.platform != "linux", reason="bytes are read from /proc")
def test_hooks_send_less(paced):
    dense = paced.measurements["ddp"].bytes_per_step
    sent = {name: measurement.bytes_per_step / dense for name, measurement in paced.measurements.items()}
    assert sent["fp16"] == pytest.approx(0.5, abs=0.1)
    assert sent["bf16"] == pytest.approx(0.5, abs=0.1)
    assert sent["post_local"] == pytest.approx(0.5, abs=0.1)
    assert sent["powersgd"] < 0.6
    assert sent["rows"] < 0.5


def test_a_worker_that_fails_is_told(monkeypatch):
    monkeypatch.setattr(conditions, "load_average", bench_modules.fails)
    with pytest.raises(WorkerError, match=r"ZeroDivisionError"):
        run_bench(BenchSettings.parse({"model": {"kind": "flat", "mib": 0.1}}))
