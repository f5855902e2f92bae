"""The table at the end of every sweep."""

from __future__ import annotations

import json
import re
import sys
from io import StringIO
from pathlib import Path

import forked
import optuna
import pytest
from hydra.core.utils import JobReturn
from rich.console import Console

from hydra_plugins.autosync._space import read_space
from hydra_plugins.autosync._table import FIGURES, figures_of, sweep_table
from lightning_autosync.cli.report import ReportResult
from lightning_autosync.report.gain import GainResult
from lightning_autosync.search import storages

SPACE = read_space({}, ["model=vgg_like,gpt_like", "ranks=2,4", "seed=1"])


def printed(study: optuna.Study, compares: bool = False) -> list[str]:
    console = Console(file=StringIO(), width=160)
    console.print(sweep_table(study, SPACE, compares))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


def swept(*figures: dict[str, str] | str) -> optuna.Study:
    """A study with a trial for each of ``figures``; text is the error of a failed one."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(study_name="sweep")
    for number, found in enumerate(figures):
        trial = study.ask({one.name: one.distribution for one in SPACE.parameters})
        trial.set_user_attr("seconds", 1.0 + number)
        if isinstance(found, str):
            trial.set_user_attr("error", found)
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            trial.set_user_attr(FIGURES, found)
            study.tell(trial, 0.5 + number)
    return study


def test_a_row_has_the_swept_keys_and_the_figures() -> None:
    lines = printed(
        swept({"best DDP": "1.2 s", "speedup": "1.50x"}, "LaunchError: no [root]\nmore", {"speedup": "2.00x"})
    )
    assert "3 trials" in lines[0]
    heading, *rows = (line for line in lines if "┃" in line or "│" in line)
    assert [cell.strip() for cell in heading.strip("┃").split("┃")] == [
        "trial", "model", "ranks", "best DDP", "speedup", "error",
    ]  # fmt: skip
    cells = [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]
    assert [row[0] for row in cells] == ["0", "1", "2"]
    assert [row[3:] for row in cells] == [
        ["1.2 s", "1.50x", ""],
        ["", "", "LaunchError: no [root]"],
        ["", "2.00x", ""],
    ]
    assert {row[1] for row in cells} <= {"vgg_like", "gpt_like"}


def test_what_jobs_return_is_shown_if_it_is_compared_and_their_time_if_there_is_nothing_else() -> None:
    study = swept({}, {})
    compared, alone = printed(study, compares=True), printed(study)
    assert "value" in compared[2]
    assert any("1.5" in line for line in compared)
    assert "time" in alone[2]
    assert any("2.000 s" in line for line in alone)


def test_names_of_what_jobs_return_are_headings() -> None:
    study = swept({}, {})
    storages.name_metrics(study, ["loss of validation"])
    assert "loss of validation" in printed(study, compares=True)[2]
    assert "loss of validation" not in printed(study)[2]


def test_figures_come_from_the_result_of_the_job(tmp_path: Path) -> None:
    job = JobReturn(working_dir=str(tmp_path))
    assert figures_of(job) == {}
    ReportResult(report="r.html", runs=()).write(tmp_path)
    assert figures_of(job) == {"report": "r.html", "runs": "0"}
    (tmp_path / "result.json").write_text(json.dumps({"format": "theirs/1"}))
    assert figures_of(job) == {}
    (tmp_path / "result.json").write_text("{")
    assert figures_of(job) == {}


@pytest.mark.slow
def test_a_sweep_of_a_verb_ends_with_the_figures_of_its_results(tmp_path: Path) -> None:
    line = ("-m", "workload=ncf", "cluster=four_equal,fat_node_star", "search_seconds=0.1", "ddp=short")
    command = [sys.executable, "-m", "lightning_autosync.cli", "predict", *line, f"hydra.sweep.dir={tmp_path}"]
    done = forked.run(command, cwd=tmp_path, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    table = done.stdout.partition("sweep 'sweep': 2 trials")[2]
    assert re.search(r"trial ┃ cluster\s+┃ best DDP\s+┃ speedup\s+┃ speedup with overlap\s+┃ speedup at bound", table)
    for number, cluster in enumerate(("four_equal", "fat_node_star")):
        figures = GainResult.read(tmp_path / str(number)).figures()
        assert re.search(rf"│ {number}\s+│ {cluster}\s+│ {figures['best DDP']}\s+│ {figures['speedup']}", table)
    record = json.loads((tmp_path / "result.json").read_text())
    assert [trial["figures"]["speedup"] for trial in record["trials"]] == [
        GainResult.read(tmp_path / number).figures()["speedup"] for number in "01"
    ]
