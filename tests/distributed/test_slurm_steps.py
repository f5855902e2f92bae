"""Workers that srun starts, on a real SLURM that this machine can reach; skipped elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import worker_calls

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.measure.launches.settings import SlurmSettings
from lightning_autosync.measure.workers import WorkerError, WorkerPool

HERE = Path(__file__).parent
PARAMETERS = {"slurm_overcommit": True}  # two ranks fit where there is one core
SMALL = ["model=flat", "model.mib=1", "ddp=short", "rounds=2", "warm_up=1"]
AUTOSYNC = [sys.executable, "-m", "lightning_autosync.cli"]


def _slurm_answers() -> bool:
    if shutil.which("sinfo") is None:
        return False
    try:
        return subprocess.run(["sinfo"], capture_output=True, timeout=10).returncode == 0
    except subprocess.TimeoutExpired:
        return False


pytestmark = [pytest.mark.slow, pytest.mark.skipif(not _slurm_answers(), reason="no SLURM answers here")]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("LOCAL_RANK", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    yield
    wait_until(lambda: not subprocess.run(["squeue", "--noheader"], capture_output=True, text=True).stdout.strip())


def wait_until(over) -> None:  # type: ignore[no-untyped-def]
    for _ in range(100):
        if over():
            return
        time.sleep(0.2)
    raise AssertionError("not over within 20 s")


def running(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_pool_on_nodes_that_are_requested() -> None:
    cluster = ClusterSpec.uniform(nodes=1, devices=2)
    with (
        SlurmSettings(kind="slurm", parameters=PARAMETERS).open(cluster) as launch,
        WorkerPool(2, launch, timeout=60.0, extra_paths=[HERE]) as pool,
    ):
        assert pool.run(worker_calls.sum_of_ranks) == [1.0, 1.0]
        with pytest.raises(WorkerError, match="rank 1 raised ValueError: no luck on 1"):
            pool.run(worker_calls.fail_on, rank=1)
        pids = pool.run(os.getpid)
        assert not set(pids) & set(pool.pids)
        pool.close()
        wait_until(lambda: not running(pids))  # while the job still runs


def batch(folder: Path, *words: str) -> Path:
    """Run a verb in a batch job of two tasks; returns its directory."""
    directory = folder / "run"
    command = " ".join([*AUTOSYNC, *words, "launch=slurm", f"hydra.run.dir={directory}"])
    options = ["--wait", "--nodes=1", "--ntasks-per-node=2", "--overcommit", f"--output={folder}/log"]
    done = subprocess.run(["sbatch", *options, f"--wrap={command}"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr + (folder / "log").read_text()
    return directory


def test_a_probe_in_a_batch_job(tmp_path: Path) -> None:
    directory = batch(tmp_path, "probe", "constants=false")
    assert ClusterSpec.load(directory / "cluster.yaml").world_size == 2


def test_a_bench_in_a_batch_job(tmp_path: Path) -> None:
    directory = batch(tmp_path, "bench", *SMALL, "ranks=2", "contenders=native", "steps=2")
    result = json.loads((directory / "result.json").read_text())
    assert len(result["conditions"]["machines"]) == 1


def test_a_search_on_nodes_that_are_requested(tmp_path: Path) -> None:
    overcommit = "+launch.parameters.slurm_overcommit=true"
    trials = ["search=random", "search.budget=3", "trial.min_steps=2", "trial.max_steps=4", "finalists=1"]
    cluster = tmp_path / "cluster.yaml"  # without rates, so that no timeline is measured in a second job
    ClusterSpec.uniform(nodes=1, devices=2).save(cluster)
    words = [
        "tune", "launch=slurm", overcommit, *SMALL, f"cluster={cluster}", *trials, f"hydra.run.dir={tmp_path}/run",
    ]  # fmt: skip
    done = subprocess.run([*AUTOSYNC, *words], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "Granted job allocation" in done.stderr
    assert (tmp_path / "run" / "plan.yaml").exists()
