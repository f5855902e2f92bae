"""Sweeps for real: grids and samplers, interrupted and resumed, and refused within a rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import forked
import optuna
import pytest
from optuna.storages.journal import JournalFileBackend
from test_workers import wait_until_gone

from hydra_plugins.autosync import _job, _study
from hydra_plugins.autosync._space import read_space

APPLICATION = Path(__file__).parents[2] / "sweep_app.py"
SWEEPER = ("hydra/sweeper=autosync", "hydra.sweep.subdir=${hydra.job.num}", "hydra.output_subdir=null")


def sweep(directory: Path, *line: str, variables: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    surroundings = {**outside(), **(variables or {})}
    return forked.run(command(directory, *line), cwd=directory, env=surroundings, capture_output=True, timeout=120)


def command(directory: Path, *line: str) -> list[str]:
    return [sys.executable, str(APPLICATION), "-m", *line, *SWEEPER, f"hydra.sweep.dir={directory / 'sweep'}"]


def outside() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.endswith("RANK")}


def record(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "sweep" / "result.json").read_text())


def study_of(directory: Path) -> optuna.Study:
    journal = JournalFileBackend(str(directory / "sweep" / "study.journal"))
    return optuna.load_study(study_name="sweep", storage=optuna.storages.JournalStorage(journal))


def jobs(finished: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in finished.stdout.splitlines() if line.startswith("job")]


@pytest.mark.slow
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
    assert [trial.state for trial in study_of(disturbed).trials] == [optuna.trial.TrialState.COMPLETE] * 4


@pytest.mark.slow
def test_a_sampler_finds_the_best_and_a_failed_trial_is_told_at_the_end(tmp_path: Path) -> None:
    sampler = ("hydra/sweeper/sampler=tpe", "hydra.sweeper.sampler.seed=0", "hydra.sweeper.sampler.n_startup_trials=3")
    aim = ("hydra.sweeper.direction=minimize", "hydra.sweeper.n_jobs=3", "hydra.sweeper.metrics=loss")
    first = sweep(tmp_path, "+x=range(1,5)", "+fail_at=4", *sampler, *aim, "hydra.sweeper.n_trials=6")
    more = sweep(
        tmp_path, "+x=range(1,5)", "+fail_at=4", *sampler, *aim, "hydra.sweeper.n_trials=9",
        "hydra.sweeper.max_failure_rate=1.0",
    )  # fmt: skip
    assert (len(jobs(first)), len(jobs(more))) == (6, 3)
    assert "sweep 'sweep': 6 trials" in first.stdout
    assert "sweep 'sweep': 9 trials" in more.stdout
    assert more.returncode == 0, more.stderr
    trials = record(tmp_path)["trials"]
    assert len(trials) == 9
    failed = [trial for trial in trials if trial["params"]["x"] == 4]
    assert all(trial["error"] == "ValueError: no luck with 4" for trial in failed)
    assert all(trial["values"] == [(trial["params"]["x"] - 3) ** 2] for trial in trials if trial not in failed)
    assert record(tmp_path)["best"][0]["values"] == [min(one["values"][0] for one in trials if one not in failed)]
    assert (first.returncode == 1) == any(trial["number"] < 6 for trial in failed)
    assert study_of(tmp_path).metric_names == ["loss"]


@pytest.mark.slow
def test_a_trial_that_cannot_be_composed_fails_alone(tmp_path: Path) -> None:
    for name in ("first", "last"):
        (tmp_path / "configs" / "db").mkdir(parents=True, exist_ok=True)
        (tmp_path / "configs" / "db" / f"{name}.yaml").write_text("rows: 3")
    line = ("--config-dir", str(tmp_path / "configs"), "+x=1", "+db=first,none,last", "hydra.sweeper.n_jobs=3")
    finished = sweep(tmp_path, *line)
    assert len(jobs(finished)) == 2, finished.stderr
    trials = record(tmp_path)["trials"]
    assert [trial["state"] for trial in trials] == ["complete", "fail", "complete"]
    assert "Could not find 'db/none'" in trials[1]["error"]
    assert finished.returncode == 1
    assert "1 of 3 trials failed:" in finished.stderr


@pytest.mark.slow
def test_what_no_launcher_can_start_fails_and_is_not_left_running(tmp_path: Path) -> None:
    (tmp_path / "configs" / "db").mkdir(parents=True)
    for name, text in (("whole", "rows: [3]"), ("torn", "rows: [3")):
        (tmp_path / "configs" / "db" / f"{name}.yaml").write_text(text)
    torn = sweep(tmp_path, "--config-dir", str(tmp_path / "configs"), "+x=1", "+db=whole,torn")
    assert "1 of 2 trials failed:" in torn.stderr
    nowhere = [*command(tmp_path, "+x=1,2"), "hydra.sweep.subdir=${nowhere}", f"hydra.sweep.dir={tmp_path / 'other'}"]
    finished = forked.run(nowhere, cwd=tmp_path, env=outside(), capture_output=True, timeout=120)
    assert finished.returncode == 1
    assert "2 of 2 trials failed:" in finished.stderr
    assert "nowhere" in finished.stderr


AIM = ("hydra.sweeper.direction=minimize",)
RANDOM = (*AIM, "hydra/sweeper/sampler=random", "hydra.sweeper.sampler.seed=1", "hydra.sweeper.n_trials=2")


@pytest.mark.slow
def test_a_grid_after_random_trials_has_every_combination(tmp_path: Path) -> None:
    space = ("+x=range(1,4)", "+seed=100000,100001")  # by Optuna's reckoning the two seeds are one
    assert sweep(tmp_path, *space, *RANDOM).returncode == 0
    drawn = {(trial["params"]["x"], trial["params"]["seed"]) for trial in record(tmp_path)["trials"]}
    assert drawn != {(1, 100000), (1, 100001)}  # those of a grid's first two trials
    grid = sweep(tmp_path, *space, *AIM)
    assert grid.returncode == 0, grid.stderr
    assert len(jobs(grid)) == 6 - len(drawn)
    found = [(trial["params"]["x"], trial["params"]["seed"]) for trial in record(tmp_path)["trials"]]
    assert set(found) == {(x, seed) for x in (1, 2, 3) for seed in (100000, 100001)}
    assert len(jobs(sweep(tmp_path, *space, *AIM))) == 0


def test_sweeps_that_ask_for_the_same_combinations_share_them(tmp_path: Path) -> None:
    space = read_space({}, ["x=1,2", "y=range(0,3)"])
    study = optuna.create_study()
    for combination in [*space.grid(), *space.grid()]:  # each of two had seen none of the other's
        study.enqueue_trial(combination)
    assert _study.enqueue_grid(study, space) == 12
    asked = []
    while (trial := _study.ask(study, tmp_path, space)) is not None:
        asked.append(tuple(_study.suggest(trial, parameter) for parameter in space.parameters))
        assert _study.started(study) == len(asked)
    assert asked == [tuple(combination.values()) for combination in space.grid()]
    assert len(_study.of_sweep(study)) == 6
    assert _study.ask(study, tmp_path, space) is None
    assert _study.enqueue_grid(study, space) == 6
    (tmp_path / "sweep").mkdir()
    _study.write_record(study, space, tmp_path / "sweep", False)
    assert [trial["number"] for trial in record(tmp_path)["trials"]] == list(range(6))


def test_a_surplus_trial_of_a_sweep_that_was_killed_is_not_run_again(tmp_path: Path) -> None:
    study = optuna.create_study()
    study.ask()
    study.ask().set_user_attr(_study.SURPLUS_KEY, True)
    assert [trial.number for trial in _study.interrupted(study, tmp_path, own=True)] == [0]
    assert [trial.state for trial in study.trials] == [optuna.trial.TrialState.RUNNING, optuna.trial.TrialState.PRUNED]


@pytest.mark.slow
def test_values_of_two_kinds_are_not_put_into_one_study(tmp_path: Path) -> None:
    assert sweep(tmp_path, "+x=1,2", *AIM).returncode == 0
    without = sweep(tmp_path, "+x=1,2")
    assert without.returncode == 1
    assert without.stderr.startswith("study 'sweep': its trials ran with hydra.sweeper.direction, but this")
    other = tmp_path / "other"
    other.mkdir()
    assert sweep(other, "+x=1,2").returncode == 0
    assert "its trials ran without hydra.sweeper.direction" in sweep(other, "+x=1,2", *AIM).stderr


@contextmanager
def waiting_sweep(directory: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A sweep whose first trial waits under torchrun, and the processes of that."""
    line = ("+x=1,2", "+wait_at=1", f"+waited={directory / 'waited'}", *TORCHRUN)
    process = subprocess.Popen(
        command(directory, *line), cwd=directory, env=outside(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True, preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout is not None
    pids: list[int] = []
    try:
        while not (directory / "waited").exists():
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.05)
        pids += [int(word) for word in (directory / "waited").read_text().split()]
        yield process, pids
    finally:
        for pid in (process.pid, *pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


TORCHRUN = ("hydra/launcher=autosync_torchrun", "hydra.launcher.nproc_per_node=1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"), [pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow), (signal.SIGINT, 1)]
)
def test_a_sweep_that_is_ended_ends_its_torchrun_and_goes_on_later(tmp_path: Path, number: int, status: int) -> None:
    with waiting_sweep(tmp_path) as (process, pids):
        process.send_signal(number)
        said = process.communicate(timeout=120)[0]
        assert process.returncode == status, said
        assert wait_until_gone(pids) == []
    assert "Ending the job's processes" in said
    again = sweep(tmp_path, "+x=1,2", "+wait_at=1", f"+waited={tmp_path / 'waited'}", *TORCHRUN)
    assert again.returncode == 0, again.stderr
    assert [trial["state"] for trial in record(tmp_path)["trials"]] == ["complete", "complete"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells of a parent's end on Linux only")
def test_a_sweep_that_is_killed_takes_its_torchrun_along(tmp_path: Path) -> None:
    with waiting_sweep(tmp_path) as (process, pids):
        process.kill()
        process.communicate(timeout=120)
        assert wait_until_gone(pids, 60.0) == []


STUBBORN = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
print(child.pid, flush=True)
signal.pause()
"""


def test_what_does_not_end_is_killed_with_all_that_it_started() -> None:
    process = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    _job.ask_to_end(process, grace=0.2)
    assert process.poll() is None
    _job.kill(process)
    assert process.returncode == -signal.SIGKILL
    assert wait_until_gone([child]) == []
    process.stdout.close()


@pytest.mark.slow
def test_a_sweep_over_something_else_is_refused(tmp_path: Path) -> None:
    assert sweep(tmp_path, "+x=1,2").returncode == 0
    other = sweep(tmp_path, "+x=1,3")
    assert other.returncode == 1
    assert other.stderr.startswith("study 'sweep': it has another search space (parameters: ")
    assert "Traceback" not in other.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("hydra/sweeper/sampler=tpe", "hydra.sweeper.n_trials=2"), "hydra.sweeper.direction: missing"),
        pytest.param(
            ("hydra/sweeper/sampler=tpe", "hydra.sweeper.direction=minimize"),
            "hydra.sweeper.n_trials: missing",
            marks=pytest.mark.slow,
        ),
        (
            ("hydra.sweeper.direction=minimise",),
            "hydra.sweeper.direction: 'minimise' is not known; did you mean 'minimize'? allowed: ",
        ),
        pytest.param(
            ("hydra.sweeper.direction=[]",), "hydra.sweeper.direction: '[]' is not known", marks=pytest.mark.slow
        ),
        pytest.param(
            ("hydra.sweeper.direction=3",), "hydra.sweeper.direction: '3' is not known", marks=pytest.mark.slow
        ),
        (("hydra.sweeper.n_trials=0",), "hydra.sweeper.n_trials: got 0; allowed: 1 or more"),
        ((*AIM, "hydra.sweeper.metrics=[a,b]"), "hydra.sweeper.metrics: ['a', 'b']: expected 1 name(s)"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, line: tuple[str, ...], message: str) -> None:
    finished = sweep(tmp_path, "+x=1,2", *line)
    assert finished.returncode == 1
    assert finished.stderr.startswith(message)


def test_no_rank_runs_a_sweep(tmp_path: Path) -> None:
    finished = sweep(tmp_path, "+x=1,2", variables={"LOCAL_RANK": "1"})
    assert finished.returncode == 1
    assert finished.stderr.startswith("cannot sweep within a rank: LOCAL_RANK is set")
    assert not jobs(finished)
