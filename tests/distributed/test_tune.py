"""`autosync tune` for real: live workers, a resumed study, a Ctrl-C, a worker that dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lightning_autosync.cli.tune import tune
from lightning_autosync.cluster import configuration_directory
from lightning_autosync.errors import AutoSyncError
from lightning_autosync.measure.interleaving import StoppingRule, TrialMeasurement, measure_in_turns
from lightning_autosync.measure.session import Contender, ContenderError
from lightning_autosync.plan import SyncPlan, builders
from lightning_autosync.search import studies
from lightning_autosync.search.tuning.job import TuningJob
from lightning_autosync.search.tuning.settings import TuningSettings

RUN = "import sys; from lightning_autosync.cli import main; sys.argv[0] = 'autosync'; main()"
SMALL = (
    "search=random",
    "model=layers60",
    "model.tensors=4",
    "model.width=16",
    "model.batch=4",
    "ddp=short",
    "trial.warm_up=1",
    "trial.min_steps=2",
    "trial.max_steps=4",
    "rounds=2",
    "finalists=1",
    "hydra.run.dir=run",
)
NETWORK = """
import torch
from lightning import LightningModule
from torch.utils.data import DataLoader, TensorDataset


class Network(LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, width)
        self.head = torch.nn.Linear(width, 1)

    def forward(self, inputs):
        return self.head(torch.relu(self.layer(inputs)))

    def training_step(self, batch, batch_index):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self(inputs), targets)
        self.log("loss", loss)
        return loss

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(32, 8), torch.randn(32, 1)), batch_size=4)
"""


def command(*line: str) -> list[str]:
    return [sys.executable, "-c", RUN, "tune", *line]


def composed(*line: str) -> dict[str, Any]:
    with initialize_config_dir(str(configuration_directory()), version_base="1.3"):
        overrides = [one for one in line if not one.startswith("hydra.")]
        data: dict[str, Any] = OmegaConf.to_container(compose("tune", overrides), resolve=True)
    return data


def tuned(directory: Path, *line: str) -> dict[str, Any]:
    tune(composed(*line), directory)
    found: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return found


@pytest.fixture
def started_here(tmp_path, monkeypatch) -> Path:
    """A folder with a user's module, where commands are started; whatever is imported from there is forgotten."""
    (tmp_path / "my_network.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_network", raising=False)
    return tmp_path


@pytest.mark.slow
def test_a_model_of_a_users_own_is_tuned_and_the_run_goes_on(started_here, capsys):
    line = ("model=imported", "model._target_=my_network.Network", "+model.width=16", *SMALL[5:], "search=random")
    found = tuned(started_here / "run", *line, "search.budget=14")
    assert found["format"] == "autosync-tuning/1"
    assert len(found["trials"]) == 14
    assert [trial["builder"] for trial in found["trials"][:2]] == ["all_reduce", "partitioned_all_reduce"]
    assert {trial["state"] for trial in found["trials"]} <= {"complete", "pruned"}
    assert all(trial["seconds"] > 0 for trial in found["trials"])
    assert [variable["name"] for variable in found["workload"]["variables"]][:2] == ["layer.weight", "layer.bias"]
    assert found["workload"]["backward_time"] > 0  # measured, for nothing is paced here
    assert found["emulated"] == {"links": False, "compute": False}
    final = found["final"]["contenders"]
    assert sum(one["kind"] == "plan" for one in final.values()) == 1
    assert {len(one["round_seconds"]) for one in final.values()} == {found["final"]["choosing"]["rounds"]} == {2}
    measured = found["opponents"]["measured"]
    assert {one["kind"] for one in measured} == {"ddp"}
    assert {name for name, one in final.items() if one["kind"] == "ddp"} <= {one["name"] for one in measured}
    assert all(trial["reference"] for trial in found["trials"])
    assert all(one["gradient_deviation"] < 1e-5 for one in final.values())
    plan = SyncPlan.load(started_here / "run" / "plan.yaml")
    assert plan.to_dict() == found["best"]["plan"]
    assert "best plan" in capsys.readouterr().out
    study = studies.load_study(started_here / "run" / "study.journal")
    assert len(study.get_trials(states=(optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED))) == 14

    again = tuned(started_here / "run", *line, "search.budget=16")
    assert len(again["trials"]) == 16
    assert [{**trial, "corrected": None} for trial in again["trials"][:14]] == [
        {**trial, "corrected": None} for trial in found["trials"]
    ]
    assert again["workload"] == found["workload"]
    assert again["opponents"]["measured"] == measured


@pytest.mark.slow
def test_an_interrupted_run_keeps_what_it_found(tmp_path):
    running = subprocess.Popen(
        command(*SMALL, "search.budget=100000"), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        _wait_for_trials(tmp_path / "run" / "study.journal", 16, running)
        running.send_signal(signal.SIGINT)
        printed, errors = running.communicate(timeout=60)
    finally:
        running.kill()
    assert "Traceback" not in errors
    assert running.returncode == 130
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found["interrupted"]
    assert (tmp_path / "run" / "report.html").exists()
    assert found["final"] is None
    assert len(found["trials"]) >= 16
    assert SyncPlan.load(tmp_path / "run" / "plan.yaml").to_dict() == found["best"]["plan"]
    assert f"hydra.run.dir={tmp_path / 'run'}" in printed
    study = studies.load_study(tmp_path / "run" / "study.journal")
    assert not study.get_trials(states=(optuna.trial.TrialState.RUNNING,))


def _wait_for_trials(journal: Path, count: int, running: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and running.poll() is None:
        if journal.exists() and journal.read_text().count('autosync:seconds"') >= count:
            return
        time.sleep(0.2)
    raise AssertionError(f"not so many trials; exit status {running.poll()}")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("model=imported", "model._target_=nowhere.Net"), r"model: 'nowhere.Net': .*nowhere"),
        pytest.param(
            ("model=imported", "model._target_=torch.nn.Linear"),
            r"model: 'torch.nn.Linear': .*in_features",
            marks=pytest.mark.slow,
        ),
        (
            ("model=imported", "model._target_=torch.nn.Linear", "+model.in_features=4", "+model.out_features=2"),
            r"^model\.data: missing; 'torch\.nn\.Linear' has no train_dataloader, so add \+model\.data\._target_=",
        ),
        (
            ("model=imported", "model._target_=os.getcwd"),
            r"model._target_: 'os.getcwd' is str, no Module",
        ),
        pytest.param(("search=tpe", "search.budget=none"), r"search.budget: ", marks=pytest.mark.slow),
        (("ranks=1",), r"^ranks: one rank has nothing to synchronize; a search needs two or more$"),
        (("launch=torchrun",), r"launch=torchrun: this process does not belong to a torchrun job"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(line, message, tmp_path):
    with pytest.raises(AutoSyncError, match=message) as caught:
        tune(composed(*line), tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_worker_that_dies_fails_its_plan_and_workers_start_again():
    model = {"kind": "layers", "tensors": 4, "width": 16, "batch": 4}
    settings = TuningSettings.parse({"model": model, "trial": {"warm_up": 1, "min_steps": 2, "max_steps": 4}})
    job = TuningJob.of(settings)
    order = job.plan_order(builders.all_reduce(job.workload, job.cluster))
    with job.session() as session:
        good, bad = TrialMeasurement(Contender("good", order)), Contender("bad", order)
        session.measure(bad, 1)
        os.kill(session.pool.pids[1], signal.SIGKILL)
        with pytest.raises(ContenderError, match="rank 1 died"):
            session.measure(bad, 1)
        assert not session.live(bad)
        measure_in_turns(session, [good], StoppingRule(settings.trial), warm_up=1)
        assert good.state == "complete"
        assert session.restarts == 1


@pytest.mark.slow
def test_a_sweep_within_torchrun_jobs_compares_what_they_found(tmp_path: Path) -> None:
    sweep = ("-m", "hydra/launcher=autosync_torchrun", "hydra.launcher.nproc_per_node=2", "launch=torchrun")
    aim = ("hydra.sweeper.direction=minimize", "search.seed=0,1", "search.budget=12", "hydra.sweep.dir=sweep")
    finished = subprocess.run(command(*sweep, *aim, *SMALL[:-1]), cwd=tmp_path, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    trials = json.loads((tmp_path / "sweep" / "result.json").read_text())["trials"]
    assert [trial["state"] for trial in trials] == ["complete", "complete"]
    results = [json.loads((tmp_path / "sweep" / str(number) / "result.json").read_text()) for number in (0, 1)]
    assert [trial["values"] for trial in trials] == [[found["best"]["seconds"]] for found in results]
