"""`autosync train` for real: its launches, its sweeps, and what it says of wrong input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import pytest
from near import cluster, near_command
from test_launch_slurm import QUICK

from lightning_autosync.cli.train import objective, train
from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import AutoSyncError, DocumentError, PlanError
from lightning_autosync.hybrid import HybridPlan, LayerPlan
from lightning_autosync.measure.models.recipes import model_of
from lightning_autosync.measure.workers import WorkerError
from lightning_autosync.plan import SyncPlan, builders
from lightning_autosync.training import job
from lightning_autosync.training.job import run_job
from lightning_autosync.training.rank import RankTraining, train_rank
from lightning_autosync.training.settings import TrainingResult, TrainingSettings
from lightning_autosync.workload import Variable, Workload

RUN = "import sys; from lightning_autosync.cli import main; sys.argv[0] = 'autosync'; main()"
SHORT = (
    "model.channels=2", "trainer.max_epochs=1", "+trainer.limit_train_batches=3", "+trainer.limit_val_batches=1",
    "trainer.accelerator=cpu",
)  # fmt: skip
MODULE = """
import torch
from lightning_autosync.training.digits import DigitsClassifier

class Mine(DigitsClassifier):
    def __init__(self, fail_on=None):
        super().__init__(channels=2)
        self.fail_on = fail_on

    def training_step(self, batch, batch_idx):
        if self.global_rank == self.fail_on:
            raise ValueError("no luck")
        return super().training_step(batch, batch_idx)

def not_a_module():
    return 3
"""


def autosync(directory: Path, *line: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN, "train", *line]
    return forked.run(command, cwd=directory, capture_output=True, timeout=180)


def quick(**settings: Any) -> TrainingSettings:
    return TrainingSettings.parse({**QUICK, **settings})


def test_a_training_leaves_its_result(tmp_path: Path) -> None:
    finished = autosync(tmp_path, "ranks=2", *SHORT, "hydra.run.dir=run")
    assert finished.returncode == 0, finished.stderr
    written = json.loads((tmp_path / "run" / "result.json").read_text())
    assert written["format"] == "autosync-training/1"
    found = TrainingResult.read(tmp_path / "run")
    assert found.to_dict() == written
    assert set(found.metrics) == {"loss", "val_loss", "val_accuracy"}
    assert [len(steps) for steps in found.step_seconds_by_rank] == [3, 3]
    assert found.plan is not None
    assert {group["topology"] for group in found.plan["groups"]} == {"shared_memory"}
    assert "shared_memory" in finished.stdout
    assert objective(found, "step_seconds") == found.median_step_seconds
    assert objective(found, "loss") == found.metrics["loss"]
    with pytest.raises(DocumentError, match="objective: 'speed' was not logged; allowed: step_seconds, loss, val"):
        objective(found, "speed")


@pytest.mark.slow
def test_a_sweep_of_trainings_compares_a_metric(tmp_path: Path) -> None:
    line = ("-m", "sync=ddp,byteps", "ranks=2", "objective=val_loss", "hydra.sweeper.direction=minimize")
    finished = autosync(tmp_path, *line, *SHORT, "hydra.sweep.dir=sweep")
    assert finished.returncode == 0, finished.stderr
    trials = json.loads((tmp_path / "sweep" / "result.json").read_text())["trials"]
    assert [trial["params"] for trial in trials] == [{"sync": "ddp"}, {"sync": "byteps"}]
    results = [json.loads((tmp_path / "sweep" / str(number) / "result.json").read_text()) for number in (0, 1)]
    assert [trial["values"] for trial in trials] == [[one["metrics"]["val_loss"]] for one in results]
    assert results[0]["plan"] is None
    # The same seed, data and, up to the order of sums, gradients.
    assert results[0]["metrics"]["val_loss"] == pytest.approx(results[1]["metrics"]["val_loss"], abs=1e-4)


@pytest.mark.slow
def test_a_bench_model_trains_by_a_plan_that_was_found_for_it(tmp_path: Path) -> None:
    settings = quick(model={"kind": "layers", "tensors": 4, "width": 8, "batch": 4}, data=None)
    workload = model_of(settings.model).workload("dense")
    plan = builders.ps(workload, ClusterSpec.uniform(nodes=1, devices=2))
    plan.save(tmp_path / "plan.yaml")
    settings = TrainingSettings.parse({**settings.model_dump(), "sync": {"plan": str(tmp_path / "plan.yaml")}})
    found = run_job(settings, tmp_path / "run")
    assert found is not None
    assert SyncPlan.from_dict(found.plan) == plan
    assert found.metrics["loss"] > 0


@pytest.mark.slow
def test_relaxed_plans_train(tmp_path: Path) -> None:
    found = run_job(quick(sync={"plan": "periodic", "semantics": "relaxed"}), tmp_path)
    assert found is not None
    assert found.plan is not None
    assert found.plan["consistency"]["mode"] == "periodic"


@pytest.mark.slow
def test_nodes_with_unlike_devices_and_ranks_in_any_order(tmp_path: Path) -> None:
    where = cluster("127.0.0.1", "127.0.0.1").to_dict()
    where["nodes"][0]["devices"] = 2
    where["rank_order"] = ["node0", "node1", "node0"]
    launch = {"kind": "ssh", "command": [near_command(tmp_path)], "interface": "lo"}
    found = run_job(quick(ranks=None, cluster=where, launch=launch), tmp_path)
    assert found is not None
    assert found.world_size == 3
    assert len(found.step_seconds_by_rank) == 3


@pytest.mark.slow
def test_under_torchrun_every_rank_is_there_already(tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "lightning_autosync.cli"]
    line = ["train", "launch=torchrun", *SHORT, "hydra.run.dir=run"]
    finished = subprocess.run(
        [sys.executable, *launch, *line], cwd=tmp_path, capture_output=True, text=True, timeout=180
    )
    assert finished.returncode == 0, finished.stderr
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found["world_size"] == 2
    refused = autosync(tmp_path, "launch=torchrun")
    assert refused.returncode == 1
    assert refused.stderr.startswith("autosync train: launch=torchrun: this process does not belong to a torchrun job")


@pytest.mark.slow
def test_the_example_of_an_own_application_trains(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "own_app.py"
    line = ["sync=byteps", "max_epochs=1", f"hydra.run.dir={tmp_path / 'run'}"]
    finished = subprocess.run([sys.executable, str(script), *line], cwd=tmp_path, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert "validation accuracy 0." in finished.stdout


@pytest.mark.slow
def test_a_sweep_by_torchrun_is_one_job_a_trial(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    sweep = ("-m", "hydra/launcher=autosync_torchrun", "launch=torchrun", "hydra.sweep.dir=sweep")
    line = (*sweep, "model=imported", "model._target_=mine.Mine", "+model.fail_on=null,1", "data=digits", *SHORT[1:])
    finished = autosync(tmp_path, *line)
    assert finished.returncode == 1
    trials = json.loads((tmp_path / "sweep" / "result.json").read_text())["trials"]
    assert [trial["state"] for trial in trials] == ["complete", "fail"]
    assert "rank 1: ValueError: no luck" in trials[1]["error"]
    assert json.loads((tmp_path / "sweep" / "0" / "result.json").read_text())["world_size"] == 2


@pytest.mark.slow
def test_a_rank_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(WorkerError, match="rank 1 raised ValueError: no luck"):
        run_job(quick(model={"_target_": "mine.Mine", "fail_on": 1}), tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": {"_target_": "nowhere.Model"}}, r"^model\._target_: 'nowhere\.Model' cannot be imported: No module"),
        (
            {"model": {"_target_": "torch.nn.Modul"}},
            r"^model\._target_: 'torch\.nn\.Modul' cannot be imported: module ",
        ),
        ({"model": {}}, r"^model: expected _target_"),
        ({"model": {"kind": "layers", "tensors": 3, "width": 2, "batch": 1}}, "^model: tensors: every layer has two"),
        ({"data": {"batch_size": 3}}, "^data: expected _target_"),
        (
            {"model": {"_target_": "mine.Model", "kind": "small"}},
            r"^model: kind: got 'small'; leave it out .* \+model\.arguments\.kind=small",
        ),
        ({"model": {"kind": "flat", "mib": 1}}, "^data: a model of kind 'flat' makes its own batches; leave data out"),
        ({"sync": {"plan": "nothing"}}, "'nothing' is neither a file .* nor a builder"),
        ({"sync": {"plan": "missing.yaml"}}, "missing.yaml: cannot be read"),
        ({"sync": {"strategy": "ddp", "plan": "ps"}}, "^sync: strategy: ddp takes neither plan nor semantics"),
        ({"checkpoint": "missing.ckpt"}, r"^checkpoint: missing\.ckpt: no such file or directory$"),
        (
            {"trainer": {"max_epoch": 1}},
            r"^trainer\.max_epoch: not known; did you mean 'max_epochs'\? allowed: accelerator, ",
        ),
        ({"trainer": {"max_epochs": "x"}}, r"^trainer\.max_epochs: 'x' is not allowed; allowed: int or null"),
        ({"trainer": {"devices": 3}}, "^trainer: devices: not allowed here; set ranks or cluster"),
        ({"launch": {"kind": "ssh"}}, "^cluster: missing; launch=ssh needs one"),
        ({"launch": {"kind": "moon"}}, "^launch"),
        ({"cluster_scale": 2.0}, "^cluster: missing; cluster_scale"),
    ],
)
def test_wrong_settings_give_one_line_before_anything_starts(
    tmp_path: Path, settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "WorkerPool", None)
    with pytest.raises(DocumentError, match=message) as caught:
        train({**QUICK, **settings}, tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"model": {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1}}, DocumentError,
         r"^model\._target_: 'torch\.nn\.Linear' is Linear, no LightningModule"),
        ({"trainer": {"max_epochs": {"_target_": "builtins.str"}}}, DocumentError,
         r"^trainer\.max_epochs: '' is not allowed; allowed: int or null"),
        ({"sync": {"plan": "ps", "semantics": "exact", "arguments": {"bucket": 3}}}, DocumentError,
         r"^sync\.arguments: .*bucket"),
        ({"sync": {"plan": "partial_reduce"}}, PlanError, "semantics are 'relaxed', but the strategy allows at most"),
    ],
)  # fmt: skip
def test_what_only_a_rank_can_know_gives_one_line_too(
    tmp_path: Path, settings: dict[str, Any], kind: type[AutoSyncError], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        train_rank(RankTraining(quick(**settings), str(tmp_path), nodes=1, devices=2))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({}, "ranks=3"),
        ({"ranks": 4}, "ranks=3"),
        ({"cluster": ClusterSpec.uniform(2).to_dict()}, "a cluster of 3 ranks"),
        ({"launch": {"kind": "slurm"}}, "ranks=3"),
    ],
)
def test_a_plan_for_another_number_of_ranks_is_refused_before_any_starts(
    tmp_path: Path, settings: dict[str, Any], remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for starts in ("WorkerPool", "submit"):
        monkeypatch.setattr(job, starts, None)
    path, ranks = tmp_path / "plan.yaml", settings.get("ranks", 2)
    weights = Workload(name="weights", variables=(Variable(name="w", shape=(2,)),))
    builders.ps(weights, ClusterSpec.uniform(3)).save(path)
    why = f"{path}: world_size: the plan is for 3 ranks, but the job has {ranks}; give a plan for {ranks} ranks"
    with pytest.raises(PlanError, match=f"^{re.escape(why)}, .*or give {remedy}$"):
        run_job(quick(sync={"plan": str(path)}, **settings), tmp_path)


def test_a_hybrid_plan_is_for_another_strategy(tmp_path: Path) -> None:
    path = tmp_path / "split.yaml"
    HybridPlan(mesh=(2,), layers=(LayerPlan(module="up", signature=("col",)),)).save(path)
    with pytest.raises(PlanError, match=r"split\.yaml: 'autosync train' .*AutoDDLStrategy\(plan="):
        run_job(quick(sync={"plan": str(path)}), tmp_path)


@pytest.mark.slow
def test_what_all_ranks_refuse_is_told_as_they_say_it(tmp_path: Path) -> None:
    """A plan for another model: only a rank has the model."""
    builders.ps(Workload(name="other", variables=(Variable(name="w", shape=(2,)),)), ClusterSpec.uniform(2)).save(
        tmp_path / "plan.yaml"
    )
    path = str(tmp_path / "plan.yaml")
    with pytest.raises(PlanError, match=rf"^{re.escape(path)}: .*'w'") as caught:
        run_job(quick(sync={"plan": path}), tmp_path)
    assert "\n" not in str(caught.value)
