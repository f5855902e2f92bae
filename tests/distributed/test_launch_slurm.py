"""Jobs that SLURM starts, with a stand-in for SLURM that runs their tasks on this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import ClusterError
from lightning_autosync.measure.launches.launch import is_slurm_task
from lightning_autosync.measure.launches.slurm import tasks_of
from lightning_autosync.measure.workers import LaunchError
from lightning_autosync.training.job import run_job
from lightning_autosync.training.settings import TrainingSettings

STAND_IN = Path(__file__).with_name("slurm_stand_in.py")
QUICK = {
    "model": {"_target_": "lightning_autosync.training.digits.DigitsClassifier", "channels": 2},
    "data": {"_target_": "lightning_autosync.training.digits.Digits"},
    "ranks": 2,
    "trainer": {
        "max_steps": 3, "limit_val_batches": 1, "accelerator": "cpu", "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    },
}  # fmt: skip

WAITING = """
import os, sys
from pathlib import Path
from lightning_autosync.measure.launches.slurm import results, submit

results(submit(os.getpid, {}, Path(sys.argv[1]), nodes=1, tasks_per_node=2, parameters={}))
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-in keeps the batch script that it was given."""
    pytest.importorskip("submitit")
    for name in ("sbatch", "srun", "sacct", "scancel"):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!{sys.executable}\n{STAND_IN.read_text()}")
        path.chmod(0o755)
    for name in ("LOCAL_RANK", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("STAND_IN_SCRIPT", str(tmp_path / "batch.sh"))
    return tmp_path / "batch.sh"


def test_a_training_is_submitted(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STAND_IN_IDLE", "1")
    parameters = {"slurm_partition": "gpu", "timeout_min": 90}
    launch = {"kind": "slurm", "parameters": parameters, "wait": False}
    assert run_job(TrainingSettings.parse({**QUICK, "launch": launch}), tmp_path / "run") is None
    assert "submitted SLURM job 4242" in capsys.readouterr().out
    script = slurm.read_text().splitlines()
    for line in ("--nodes=1", "--ntasks-per-node=2", "--partition=gpu", "--time=90", "--job-name=autosync"):
        assert f"#SBATCH {line}" in script
    assert any(line.startswith("srun ") and "--kill-on-bad-exit=1" in line for line in script)


@pytest.mark.slow
def test_a_job_runs_and_comes_back(slurm: Path, tmp_path: Path) -> None:
    found = run_job(TrainingSettings.parse({**QUICK, "launch": {"kind": "slurm"}}), tmp_path / "run")
    assert found is not None
    assert (found.world_size, found.steps) == (2, 3)
    assert len(found.step_seconds_by_rank) == 2
    assert found.to_dict() == json.loads((tmp_path / "run" / "result.json").read_text())


@pytest.mark.slow
def test_every_rank_that_failed_is_told(slurm: Path, tmp_path: Path) -> None:
    wrong = {**QUICK, "trainer": {**QUICK["trainer"], "precision": "seven"}, "launch": {"kind": "slurm"}}
    with pytest.raises(LaunchError, match=r"SLURM job 4242: rank \d: .*seven.*output in .*slurm"):
        run_job(TrainingSettings.parse(wrong), tmp_path / "run")


def wait_and_be_told(slurm: Path, name: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Wait for a job in a process of its own, which gets a signal as soon as it asks for the job's state."""
    return subprocess.run(
        [sys.executable, "-c", WAITING, str(slurm.parent / "slurm")],
        env={**os.environ, "STAND_IN_IDLE": "1", "STAND_IN_SIGNAL": name, **variables},
        capture_output=True, text=True, timeout=120,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


@pytest.mark.parametrize(("name", "status"), [pytest.param("SIGINT", -2, marks=pytest.mark.slow), ("SIGTERM", 143)])
def test_a_wait_that_is_interrupted_cancels_the_job(slurm: Path, name: str, status: int) -> None:
    ended = wait_and_be_told(slurm, name)
    assert ended.returncode == status, ended.stderr
    assert Path(f"{slurm}.cancelled").read_text() == "4242"
    assert "interrupted; SLURM job 4242 is cancelled\n" in ended.stderr


@pytest.mark.slow
def test_a_job_that_cannot_be_cancelled_is_told(slurm: Path) -> None:
    ended = wait_and_be_told(slurm, "SIGTERM", STAND_IN_REFUSAL="1")
    assert ended.returncode == 143, ended.stderr
    assert "interrupted; SLURM job 4242 continues, because it could not be cancelled: Command" in ended.stderr


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ({}, False),  # a batch script
        ({"SLURM_STEP_ID": "batch", "SLURM_STEP_NUM_TASKS": "4"}, False),
        ({"SLURM_STEP_ID": "4294967291", "SLURM_STEP_NUM_TASKS": "4"}, False),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, False),  # srun --pty bash
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, True),
    ],
)
def test_only_srun_makes_tasks(monkeypatch: pytest.MonkeyPatch, step: dict[str, str], expected: bool) -> None:
    for variable in ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", **step}.items():
        monkeypatch.setenv(variable, value)
    assert is_slurm_task() == expected


def test_without_slurm_it_says_where_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(
        LaunchError, match="launch=slurm: 'sbatch' is not installed; run this on a machine from which SLURM"
    ):
        run_job(TrainingSettings.parse({**QUICK, "launch": {"kind": "slurm"}}), tmp_path)


def test_parameters_that_submitit_does_not_know(slurm: Path, tmp_path: Path) -> None:
    launch = {"kind": "slurm", "parameters": {"slurm_queue": "gpu"}}
    with pytest.raises(LaunchError, match=r"launch\.parameters: .*queue"):
        run_job(TrainingSettings.parse({**QUICK, "launch": launch}), tmp_path)


def test_clusters_whose_nodes_slurm_cannot_express() -> None:
    nodes = [{"name": "a", "devices": 2}, {"name": "b"}]
    links = [{"a": "a", "b": "b"}]
    uneven = {"format": ClusterSpec.FORMAT, "name": "uneven", "nodes": nodes, "links": links}
    with pytest.raises(ClusterError, match="launch=slurm needs the same number on every node"):
        tasks_of(ClusterSpec.from_dict(uneven))
    even = ClusterSpec.uniform(nodes=2, devices=2)
    assert tasks_of(even) == (2, 2)
    names = [node.name for node in even.nodes]
    with pytest.raises(ClusterError, match="rank_order: launch=slurm needs ranks numbered node by node"):
        tasks_of(even.with_rank_order([names[0], names[1], names[0], names[1]]))
