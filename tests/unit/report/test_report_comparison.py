"""The report that compares tuning runs."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import pytest
from tuning_runs import write_run

from lightning_autosync.cli.report import report
from lightning_autosync.documents import write_text
from lightning_autosync.errors import DocumentError
from lightning_autosync.report.comparison import find_runs
from lightning_autosync.report.tuning_run import grouped


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two cases, two samplers, two seeds; one run is shorter."""
    directory = tmp_path_factory.mktemp("sweep")
    for number, (model, sampler, seed) in enumerate(
        (m, s, n) for m in ("gpt", "vgg16") for s in ("autosync", "tpe") for n in (0, 1)
    ):
        budget = 20 if number == 1 else 26
        write_run(directory / str(number), budget, seed, "fat_node_star", model, sampler, journal=False)
    return directory


def test_runs_are_sorted_by_case_and_sampler(sweep: Path) -> None:
    cases = grouped(find_runs([sweep]))
    assert [case.title for case in cases] == ["gpt_like on fat_node_star", "vgg16_like on fat_node_star"]
    assert [[group.sampler for group in case.groups] for case in cases] == [["autosync", "tpe"]] * 2
    assert all([run.seed for run in group.runs] == [0, 1] for case in cases for group in case.groups)


def test_medians_go_as_far_as_all_runs(sweep: Path) -> None:
    group = grouped(find_runs([sweep]))[0].groups[0]
    assert [len(speeds) for speeds in group.speeds] == [26, 20]
    assert len(group.middle) == 20
    columns = list(zip(*group.speeds, strict=False))
    assert group.middle == [statistics.median(column) for column in columns]
    least, most = group.band
    assert all(low <= middle <= high for low, middle, high in zip(least, group.middle, most, strict=True))
    run = group.runs[1]
    assert run.ddp_seconds is not None
    assert group.speeds[1][-1] == pytest.approx(run.ddp_seconds / run.best_so_far[-1])


def test_trials_until_the_best_known_plan(sweep: Path) -> None:
    for case in grouped(find_runs([sweep])):
        counts = [case.trials_to_close(run) for run in case.runs]
        best = max(case.runs, key=lambda run: run.speeds[-1])
        assert counts[case.runs.index(best)] == best.trials_to_98
        for run, count in zip(case.runs, counts, strict=True):
            reached = run.speeds[-1] >= 0.98 * case.best_known
            assert (count is not None) == reached


@pytest.mark.slow
def test_the_page_has_every_run_and_links_to_their_reports(sweep: Path, tmp_path: Path) -> None:
    report({"run": str(sweep / "3")}, tmp_path)
    report({"runs": str(sweep)}, tmp_path)
    page = (sweep / "report.html").read_text()
    assert page.count("<svg") == 3
    assert page.count('href="3/report.html"') == 1
    rows = json.loads((tmp_path / "result.json").read_text())["runs"]
    assert len(rows) == 8
    for row in rows:
        over = row["over_ddp"]
        assert f"{over['median']:.2f} ({over['low']:.2f} to {over['high']:.2f})" in page


def test_runs_of_a_list_are_compared_in_the_verbs_own_directory(sweep: Path, tmp_path: Path) -> None:
    report({"runs": [str(sweep / "0"), str(sweep / "1"), str(sweep / "0")]}, tmp_path)
    assert "Comparison of 2 tuning runs" in (tmp_path / "report.html").read_text()


def test_other_results_of_a_sweep_are_passed_over_and_broken_ones_are_not(sweep: Path, tmp_path: Path) -> None:
    write_text(tmp_path / "bench" / "result.json", '{"format": "autosync-bench/1"}')
    for name, text in (("text", "no JSON"), ("list", '[Infinity, "'), ("large", "[" + "0," * 500_000 + "0]")):
        write_text(tmp_path / name / "result.json", text)
    whole = json.loads((sweep / "0" / "result.json").read_text())
    whole["environment"]["load"] = math.inf
    write_text(tmp_path / "run" / "result.json", json.dumps(whole))
    assert [run.directory.name for run in find_runs([tmp_path])] == ["run"]
    write_text(tmp_path / "cut" / "result.json", '{"format": "autosync-tuning/1", "tri')
    with pytest.raises(DocumentError, match=r"cut/result\.json: not valid JSON"):
        find_runs([tmp_path])
