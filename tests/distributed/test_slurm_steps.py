"""Verbs and trainings on a real SLURM: one that this machine reaches, or one that the tests start on it as root."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import worker_calls
from slurm_here import running_slurm, why_not

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.measure.launches.settings import SlurmSettings
from lightning_autosync.measure.workers import WorkerError, WorkerPool
from lightning_autosync.training.settings import TrainingResult

HERE = Path(__file__).parent
PARAMETERS = {"slurm_overcommit": True}  # two ranks fit where there is one core
SMALL = ["model=flat", "model.mib=1", "ddp=short", "rounds=2", "warm_up=1"]
SHORT = ["model.channels=2", "trainer.max_epochs=1", "+trainer.limit_train_batches=3", "trainer.accelerator=cpu"]
AUTOSYNC = [sys.executable, "-m", "lightning_autosync.cli"]


TRAINING = """
import json, sys
import lightning as L
import lightning_autosync
from lightning_autosync.training.digits import Digits, DigitsClassifier

L.seed_everything(0)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = L.Trainer(
    strategy="autosync", accelerator="cpu", num_nodes=int(sys.argv[1]), devices=int(sys.argv[2]), max_steps=4,
    limit_val_batches=0, **quiet,
)
model = DigitsClassifier(channels=2)
trainer.fit(model, datamodule=Digits())
found = {
    "world": trainer.world_size, "steps": trainer.global_step, "node": trainer.node_rank,
    "weights": [value.double().sum().item() for value in model.parameters()],
    "plan": trainer.strategy.plan.fingerprint,
}
with open(f"{sys.argv[3]}/{trainer.global_rank}.json", "w") as file:
    json.dump(found, file)
"""


def _slurm_answers() -> bool:
    if shutil.which("sinfo") is None:
        return False
    try:
        return subprocess.run(["sinfo"], capture_output=True, timeout=10).returncode == 0
    except subprocess.TimeoutExpired:
        return False


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """The configuration of a SLURM that these tests start, None if one answers already."""
    if _slurm_answers():
        yield None
    elif reason := why_not():
        pytest.skip(f"no SLURM answers here, and none can be started: {reason}")
    else:
        with running_slurm(tmp_path_factory.mktemp("slurm")) as configuration:
            yield configuration


@pytest.fixture(autouse=True)
def environment(slurm: Path | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("LOCAL_RANK", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    if slurm is not None:
        monkeypatch.setenv("SLURM_CONF", str(slurm))
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


def batch(folder: Path, command: Sequence[str], nodes: int = 1, tasks: int = 2) -> None:
    """Run a command in a batch job, and wait for it."""
    options = ["--wait", f"--nodes={nodes}", f"--ntasks-per-node={tasks}", "--overcommit", f"--output={folder}/log"]
    done = subprocess.run(
        ["sbatch", *options, f"--wrap={shlex.join(command)}"], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr + (folder / "log").read_text()


def verb(folder: Path, *words: str) -> Path:
    """Run a verb in a batch job of two tasks; returns its directory."""
    directory = folder / "run"
    batch(folder, [*AUTOSYNC, *words, "launch=slurm", f"hydra.run.dir={directory}"])
    return directory


def test_a_script_trains_under_srun(slurm: Path | None, tmp_path: Path) -> None:
    """On two nodes where the tests started this SLURM, whose nodes have one machine's memory."""
    nodes, tasks = (1, 2) if slurm is None else (2, 1)
    (tmp_path / "train.py").write_text(TRAINING)
    batch(
        tmp_path,
        ["srun", sys.executable, f"{tmp_path}/train.py", str(nodes), str(tasks), str(tmp_path)],
        nodes=nodes,
        tasks=tasks,
    )
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first["weights"] == second["weights"]
    assert (first["world"], first["steps"]) == (2, 4)
    assert second["node"] == nodes - 1
    assert first["plan"] == second["plan"]
    assert f"plan {first['plan']}" in (tmp_path / "log").read_text()


def test_a_training_as_tasks_of_srun(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    batch(tmp_path, ["srun", *AUTOSYNC, "train", "launch=slurm", *SHORT, f"hydra.run.dir={directory}"])
    assert TrainingResult.read(directory).world_size == 2


def test_a_training_that_the_verb_submits(tmp_path: Path) -> None:
    overcommit = "+launch.parameters.slurm_additional_parameters={overcommit:true}"
    words = ["train", "launch=slurm", overcommit, "ranks=2", *SHORT, f"hydra.run.dir={tmp_path}/run"]
    done = subprocess.run([*AUTOSYNC, *words], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert TrainingResult.read(tmp_path / "run").world_size == 2


def test_a_probe_in_a_batch_job(tmp_path: Path) -> None:
    directory = verb(tmp_path, "probe", "constants=false")
    assert ClusterSpec.load(directory / "cluster.yaml").world_size == 2


def test_a_bench_in_a_batch_job(tmp_path: Path) -> None:
    directory = verb(tmp_path, "bench", *SMALL, "ranks=2", "contenders=native", "steps=2")
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
