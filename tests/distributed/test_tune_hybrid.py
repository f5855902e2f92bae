"""`autosync tune parallel=hybrid` on real ranks: what it leaves, that it resumes, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import optuna
import pytest

from lightning_autosync.cli import main
from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.hybrid import HybridPlan
from lightning_autosync.hybrid.rates import HybridRates
from lightning_autosync.plan import SyncPlan
from lightning_autosync.search.hybrid.result import is_hybrid_run, plan_of, read_hybrid_result
from lightning_autosync.search.storages import open_storage
from lightning_autosync.workload import Workload

RUN = "import sys; from lightning_autosync.cli import main; sys.argv[0] = 'autosync'; main()"
SHORT = ("trial.min_steps=1", "trial.max_steps=2", "trial.warm_up=1", "rounds=1", "steps=1", "warm_up=1", "finalists=1")
Here = Callable[..., tuple[object, str, str]]
MODEL = ("model=perceptron", "model.widths=[64,256,256,16]", "model.batch=4")


def autosync(directory: Path, verb: str, *line: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN, verb, *line]
    return forked.run(command, cwd=directory, capture_output=True, timeout=300)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """A verb in this process, for those that start no workers: its exit status, output and errors."""

    def run(directory: Path, *line: str) -> tuple[object, str, str]:
        monkeypatch.chdir(directory)
        monkeypatch.setattr(sys, "argv", ["autosync", *line])
        status: object = 0
        try:
            main()
        except SystemExit as ended:
            status = ended.code
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory of a short run, and what it printed."""
    directory = tmp_path_factory.mktemp("hybrid")
    ClusterSpec.uniform(2, 1, "10 Mbit/s", name="slow").save(directory / "slow.yaml")
    options = ("parallel=hybrid", "parallel.trials=2", "cluster=slow.yaml", "ddp=short", *MODEL, *SHORT)
    finished = autosync(directory, "tune", *options, "hydra.run.dir=run")
    assert finished.returncode == 0, finished.stderr
    return directory, finished.stdout


def test_it_leaves_a_plan_a_study_a_result_and_a_report(found: tuple[Path, str]) -> None:
    directory, printed = found
    run = directory / "run"
    assert is_hybrid_run(run)
    result = read_hybrid_result(run)
    assert {trial.origin for trial in result.trials} == {"ddp", "builder", "megatron", "search"}
    assert all(trial.state != "failed" for trial in result.trials), [trial.why for trial in result.trials]
    assert result.best is not None
    kind = HybridPlan if result.best.origin in ("search", "megatron") else SyncPlan
    assert kind.load(run / "plan.yaml") == result.plan
    assert f"best plan: {result.best.name}" in printed
    assert HybridRates.load(run / "rates.yaml").to_dict() == result.rates
    assert ClusterSpec.load(run / "cluster.yaml").to_dict() == result.cluster
    assert Workload.load(run / "workload.yaml").variables
    assert "<svg" in (run / "report.html").read_text()
    study = optuna.load_study(storage=open_storage(run / "study.journal"), study_name="tune")
    assert len(study.get_trials()) == len(result.trials)
    assert float(result) > 0


def test_split_plans_compute_ddp_gradients(found: tuple[Path, str]) -> None:
    result = read_hybrid_result(found[0] / "run")
    split = [trial for trial in result.trials if trial.origin in ("search", "megatron")]
    assert split
    for trial in split:
        assert trial.deviation is not None
        assert trial.deviation < 1e-5
        assert isinstance(plan_of(trial), HybridPlan)
    assert result.comparison is not None
    assert {trial.name for trial in split} & result.comparison.contenders.keys()


@pytest.mark.skipif(sys.platform != "linux", reason="bytes are read from /proc")
def test_predicted_bytes_are_those_on_the_wire(found: tuple[Path, str]) -> None:
    result = read_hybrid_result(found[0] / "run")
    assert result.final is not None
    predicted = {trial.name: trial.bytes for trial in result.trials if trial.bytes}
    measured = {name: one["bytes_per_step_and_rank"] for name, one in result.final["contenders"].items()}
    compared = predicted.keys() & measured.keys()
    assert compared
    for name in compared:
        assert measured[name] == pytest.approx(predicted[name], rel=0.3, abs=4096)


@pytest.mark.slow
def test_a_run_goes_on_and_measures_nothing_twice(found: tuple[Path, str]) -> None:
    directory, _ = found
    before = read_hybrid_result(directory / "run").trials
    options = ("parallel=hybrid", "parallel.trials=2", "cluster=slow.yaml", "ddp=short", *MODEL, *SHORT)
    finished = autosync(directory, "tune", *options, "hydra.run.dir=run")
    assert finished.returncode == 0, finished.stderr
    assert read_hybrid_result(directory / "run").trials == before


@pytest.mark.slow
def test_its_report_can_be_written_again(found: tuple[Path, str], here: Here) -> None:
    directory, _ = found
    assert here(directory, "report", "run=run", "file=again.html", "hydra.run.dir=report")[0] == 0
    assert (directory / "again.html").read_text() == (directory / "run" / "report.html").read_text()
    rows: Any = json.loads((directory / "report" / "result.json").read_text())["runs"]
    assert rows[0]["plan"] == read_hybrid_result(directory / "run").best.name  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("model=vgg_like", "cluster=four_equal"), "parallel: hybrid needs a model with operators to split"),
        pytest.param(
            (*MODEL, "cluster=shape.yaml"), "cluster 'shape': links[0].bandwidth: unknown", marks=pytest.mark.slow
        ),
        pytest.param(
            (*MODEL, "cluster=four_equal", "transfer=rates", "transfer.rates=none.yaml"),
            "none.yaml: cannot be read",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (*MODEL, "cluster=four_equal", "transfer=simulator", "transfer.simulator=fitted"),
            "transfer: parallel=hybrid takes transfer=rates only",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (*MODEL, "cluster=four_equal", "parallel.kind=data", "parallel.memory=1GB"),
            "parallel: memory: allowed with parallel=hybrid only",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_it_cannot_do_is_refused(tmp_path: Path, here: Here, options: tuple[str, ...], message: str) -> None:
    ClusterSpec.uniform(2, name="shape").save(tmp_path / "shape.yaml")
    status, _, _ = here(tmp_path, "tune", "parallel=hybrid", "ddp=short", *options, "hydra.run.dir=run")
    assert message in str(status)


@pytest.mark.slow
def test_a_prediction_tells_bytes_and_memory(found: tuple[Path, str], here: Here) -> None:
    directory, _ = found
    result = read_hybrid_result(directory / "run")
    trial = next(trial for trial in result.trials if trial.origin == "megatron")
    plan = plan_of(trial)
    assert plan is not None
    plan.save(directory / "megatron.yaml")
    model = ("model@module=perceptron", "module.widths=[64,256,256,16]", "module.batch=4")
    options = ("plan=megatron.yaml", "cluster=slow.yaml", *model, "rates=run/rates.yaml", "hydra.run.dir=prediction")
    status, printed, _ = here(directory, "predict", *options)
    assert status == 0
    data = json.loads((directory / "prediction" / "result.json").read_text())
    assert data["bytes"] == pytest.approx(trial.bytes)
    assert data["step_seconds"] == pytest.approx(trial.predicted)
    assert sum(data["memory"].values()) == pytest.approx(trial.memory)
    assert "bytes that each rank sends" in printed
    status, _, _ = here(directory, "predict", "plan=megatron.yaml", "cluster=slow.yaml", "hydra.run.dir=prediction")
    assert "module: missing; 'megatron.yaml' splits a model's operators" in str(status)
