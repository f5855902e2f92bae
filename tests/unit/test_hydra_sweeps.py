"""Sweeps for real: grids and samplers, interrupted and resumed, and refused within a rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages.journal import JournalFileBackend

APPLICATION = Path(__file__).parents[1] / "sweep_app.py"
SWEEPER = ("hydra/sweeper=autosync", "hydra.sweep.subdir=${hydra.job.num}", "hydra.output_subdir=null")


def sweep(directory: Path, *line: str, variables: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    outside = {name: value for name, value in os.environ.items() if not name.endswith("RANK")}
    command = [sys.executable, str(APPLICATION), "-m", *line, *SWEEPER, f"hydra.sweep.dir={directory / 'sweep'}"]
    return subprocess.run(
        command, cwd=directory, env={**outside, **(variables or {})}, capture_output=True, text=True, timeout=120
    )


def record(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "sweep" / "result.json").read_text())


def jobs(finished: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in finished.stdout.splitlines() if line.startswith("job")]


def test_an_interrupted_grid_goes_on_and_equals_an_undisturbed_one(tmp_path: Path) -> None:
    disturbed, undisturbed = tmp_path / "disturbed", tmp_path / "undisturbed"
    grid = ("+x=1,2", "+sampler=tpe,random")
    for directory in (disturbed, undisturbed):
        directory.mkdir()
    line = (*grid, "+die_at=2", f"+died={tmp_path / 'died'}")
    killed = sweep(disturbed, *line)
    assert killed.returncode == -9
    assert [trial["state"] for trial in record(disturbed)["trials"]] == ["complete"] * 2
    resumed = sweep(disturbed, *line)
    assert resumed.returncode == 0, resumed.stderr
    assert len(jobs(killed)) == 3  # the third was killed, and is run again
    assert len(jobs(resumed)) == 2
    whole = sweep(undisturbed, *line)
    assert whole.returncode == 0, whole.stderr
    found, expected = record(disturbed)["trials"], record(undisturbed)["trials"]
    assert [(one["number"], one["params"], one["state"]) for one in found] == [
        (one["number"], one["params"], one["state"]) for one in expected
    ]
    study = optuna.load_study(
        study_name="sweep",
        storage=optuna.storages.JournalStorage(JournalFileBackend(str(disturbed / "sweep" / "study.journal"))),
    )
    assert [trial.state for trial in study.trials] == [optuna.trial.TrialState.COMPLETE] * 4


def test_a_sampler_finds_the_best_and_a_failed_trial_is_told_at_the_end(tmp_path: Path) -> None:
    sampler = ("hydra/sweeper/sampler=tpe", "hydra.sweeper.sampler.seed=0", "hydra.sweeper.sampler.n_startup_trials=3")
    aim = ("hydra.sweeper.direction=minimize", "hydra.sweeper.n_jobs=3")
    first = sweep(tmp_path, "+x=range(1,5)", "+fail_at=4", *sampler, *aim, "hydra.sweeper.n_trials=6")
    more = sweep(
        tmp_path, "+x=range(1,5)", "+fail_at=4", *sampler, *aim, "hydra.sweeper.n_trials=9",
        "hydra.sweeper.max_failure_rate=1.0",
    )  # fmt: skip
    assert (len(jobs(first)), len(jobs(more))) == (6, 3)
    assert more.returncode == 0, more.stderr
    trials = record(tmp_path)["trials"]
    assert len(trials) == 9
    failed = [trial for trial in trials if trial["params"]["x"] == 4]
    assert all(trial["error"] == "ValueError: no luck with 4" for trial in failed)
    assert all(trial["values"] == [(trial["params"]["x"] - 3) ** 2] for trial in trials if trial not in failed)
    assert record(tmp_path)["best"][0]["values"] == [min(one["values"][0] for one in trials if one not in failed)]
    assert (first.returncode == 1) == any(trial["number"] < 6 for trial in failed)


def test_a_sweep_over_something_else_is_refused(tmp_path: Path) -> None:
    assert sweep(tmp_path, "+x=1,2").returncode == 0
    other = sweep(tmp_path, "+x=1,3")
    assert other.returncode == 1
    assert other.stderr.startswith("study 'sweep': it is over something else (parameters: ")
    assert "Traceback" not in other.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("hydra/sweeper/sampler=tpe", "hydra.sweeper.n_trials=2"), "hydra.sweeper.direction: missing"),
        (("hydra/sweeper/sampler=tpe", "hydra.sweeper.direction=minimize"), "hydra.sweeper.n_trials: missing"),
        (("hydra.sweeper.direction=least",), r"hydra.sweeper.direction: ['least']: allowed: minimize, maximize"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, line: tuple[str, ...], message: str) -> None:
    finished = sweep(tmp_path, "+x=1,2", *line)
    assert finished.returncode == 1
    assert message in finished.stderr


def test_no_rank_runs_a_sweep(tmp_path: Path) -> None:
    finished = sweep(tmp_path, "+x=1,2", variables={"LOCAL_RANK": "1"})
    assert finished.returncode == 1
    assert finished.stderr.startswith("a sweep within a rank: LOCAL_RANK is set")
    assert not jobs(finished)
