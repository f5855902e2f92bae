"""A user sees how a job synchronizes: metrics in the loggers, lines about trials, a page, and a plan to keep."""

from __future__ import annotations

from importlib import import_module
from statistics import median
from typing import Any

import monitor_jobs
import pytest
from models import Plain
from sweeps import sweep

import lightning_autosync
from lightning_autosync.errors import DocumentError
from lightning_autosync.strategy.monitor.lightning import SyncMonitor


@pytest.fixture(scope="module")
def tuned(duo: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return duo.run(monitor_jobs.tuned, folder=str(tmp_path_factory.mktemp("tuned")))


def test_metrics_are_plausible_and_follow_the_plan(tuned: list[dict[str, Any]]) -> None:
    found, report = tuned[0], tuned[0]["report"]
    rows = found["rows"]
    assert len(rows) == 12 * 8 // monitor_jobs.EVERY
    for row in rows:
        assert 0 <= row["autosync/wait"] < row["autosync/step_time"] < 10
        assert 0 <= row["autosync/overlap"] <= 1
        assert 0 < row["autosync/share_of_bound"] < 2
        assert min(found["sent"].values()) - 1 <= row["autosync/bytes"] <= max(found["sent"].values()) + 1
    # Medians of few steps do not add up, so a single row may be above 1.
    assert median(row["autosync/share_of_bound"] for row in rows) < 1.1
    accepted = [trial for trial in report["trials"] if trial["accepted"]]
    assert accepted
    assert rows[0]["autosync/plan_changes"] == 0
    assert rows[-1]["autosync/plan_changes"] == len(accepted)
    assert rows[-1]["autosync/bytes"] == pytest.approx(found["sent"][report["plan"]])
    assert found["hyperparameters"]["autosync_plan"] == report["plan"]
    assert tuned[1]["rows"] == []


def test_the_end_of_tuning_is_logged_in_the_step_in_which_it_comes(tuned: list[dict[str, Any]]) -> None:
    (end,) = tuned[0]["ended"]
    passes = sorted({1, end, *range(monitor_jobs.EVERY, 12 * 8 + 1, monitor_jobs.EVERY)})
    assert tuned[0]["tuning"] == [[each - 1, each < end] for each in passes]


def test_each_trial_is_one_line_in_the_log_and_so_are_the_begin_and_the_end(tuned: list[dict[str, Any]]) -> None:
    told, trials = tuned[0]["told"], tuned[0]["report"]["trials"]
    assert len(told) == len(trials) + 2
    assert "may be tried on training steps; the present plan is" in told[0]
    for line, trial in zip(told[1:-1], trials, strict=True):
        assert f"tried {trial['name']} (plan {trial['plan']}): {trial['speedup']:.2f}x as fast as" in line
        assert line.endswith("not kept") is not trial["accepted"]
    assert "makes steps" in told[-1]


def test_the_page_of_a_job_shows_its_plan_its_links_and_its_trials(tuned: list[dict[str, Any]]) -> None:
    page, report = tuned[0]["page"], tuned[0]["report"]
    assert report["plan"] in page
    assert report["reason"].split(";")[0] in page
    for trial in report["trials"]:
        assert trial["plan"] in page
        assert f"{trial['speedup']:.2f}x" in page
    for name in ("messages", "cluster", "history", "steps"):
        assert f'<figure id="{name}">' in page
    assert "measured on rank 0" in page
    assert "http://" not in page.replace("http://www.w3.org", "")


@pytest.mark.parametrize("builder", ["all_reduce", "ps"])
def test_bytes_are_those_that_the_kernel_counts(duo: Any, tmp_path: Any, builder: str) -> None:
    found = duo.run(monitor_jobs.bytes_of, folder=str(tmp_path), builder=builder)[0]
    (logged,) = {row["autosync/bytes"] for row in found["rows"]}
    assert found["sent"]
    assert found["sent"] == pytest.approx([logged] * len(found["sent"]), rel=0.1)


def watched(duo: Any, folder: Any, kind: str) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """What rank 0 logged under one of the strategies of `monitor_jobs.WATCHED`."""
    first, second = duo.run(monitor_jobs.watched, folder=str(folder), kind=kind)
    assert second["rows"] == []
    assert first["hyperparameters"]["autosync_plan"] == first["plan"]
    for row in first["rows"]:
        assert 0 <= row["autosync/wait"] < row["autosync/step_time"] < 10
    return first["rows"], first


def test_with_overlap_waits_and_what_was_hidden_are_those_of_the_next_forward_pass_too(duo: Any, tmp_path: Any) -> None:
    rows, found = watched(duo, tmp_path, "overlap")
    assert len(rows) == 2 * 8 // monitor_jobs.EVERY
    assert all(row["autosync/overlapped_steps"] > 0.5 for row in rows)
    assert all(0 <= row["autosync/overlap"] <= 1 and row["autosync/share_of_bound"] > 0 for row in rows)
    assert "100% of the steps ended their backward pass without a wait" in found["page"]


def test_steps_do_not_overlap_where_sums_are_in_shared_memory(duo: Any, tmp_path: Any) -> None:
    rows, found = watched(duo, tmp_path, "overlap on one machine")
    assert "shared memory" in found["report"]
    assert {row["autosync/overlapped_steps"] for row in rows} == {0.0}
    assert {row["autosync/tuning"] for row in rows} == {0.0}


def test_with_batch_shares_the_share_of_the_rank_is_logged(duo: Any, tmp_path: Any) -> None:
    rows, found = watched(duo, tmp_path, "shares")
    assert {row["autosync/batch_share"] for row in rows} == {0.75}
    assert "\nbatch shares at first: 75.0%, 25.0% for ranks 0 to 1 (given)\n" in found["report"]
    assert found["report"].endswith("\ntuning: no other plan is tried: the plan was given")
    assert '<td class="number">75.0%</td><td class="number">25.0%</td><td>given</td>' in found["page"]


def test_the_page_of_a_job_on_one_machine_has_no_empty_parts(duo: Any, tmp_path: Any) -> None:
    _, found = watched(duo, tmp_path, "one machine")
    assert found["page"].count("no other plan is tried") == 1
    assert found["report"].endswith("\ntuning: no other plan is tried: all ranks run on one machine")
    for empty in (
        "No picture of the links",
        "rates of the links are unknown",
        'id="trials"',
        'id="cluster"',
        'id="shares"',
    ):
        assert empty not in found["page"]
    assert '<figure id="steps">' in found["page"]


@pytest.mark.parametrize("kind", sweep(["partial_reduce", "asynchronous"], ["partial_reduce"]))
def test_relaxed_plans_have_step_times_waits_and_bytes(duo: Any, tmp_path: Any, kind: str) -> None:
    rows, _ = watched(duo, tmp_path, kind)
    assert rows
    assert all(row["autosync/wait"] > 0 for row in rows)
    assert all(row["autosync/bytes"] > 20_000 for row in rows)
    assert all("autosync/overlap" not in row and "autosync/tuning" not in row for row in rows)


def test_strategies_without_the_metrics_say_so_once(duo: Any, tmp_path: Any) -> None:
    first, second = duo.run(monitor_jobs.silent, folder=str(tmp_path))
    assert first["rows"] == []
    assert len(first["warnings"]) == 1
    assert "SyncMonitor logs nothing under" in first["warnings"][0]
    assert second["warnings"] == []


def test_a_saved_plan_can_be_pinned(duo: Any, tmp_path: Any) -> None:
    for found in duo.run(monitor_jobs.pinned, folder=str(tmp_path)):
        assert found["plans"][0] == found["plans"][1]
        assert found["distance"] < 1e-5
        assert found["trials"] == 0


@pytest.mark.parametrize(("framework", "home"), [("lightning.pytorch", "lightning"), ("pytorch_lightning", "pytorch")])
def test_both_frameworks_have_the_callback(framework: str, home: str, tmp_path: Any) -> None:
    monitor = import_module(f"lightning_autosync.strategy.monitor.{home}").SyncMonitor(every_n_steps=2)
    made = import_module(framework)
    assert isinstance(monitor, made.Callback)
    logger = import_module(f"{framework}.loggers").CSVLogger(tmp_path)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "limit_train_batches": 4, **quiet}
    module = import_module(f"{framework}.demos.boring_classes").BoringModel()
    with pytest.warns(UserWarning, match="SyncMonitor logs nothing under SingleDeviceStrategy"):
        made.Trainer(logger=logger, callbacks=[monitor], **options).fit(module)


def test_wrong_uses_are_clear_errors() -> None:
    assert lightning_autosync.SyncMonitor is SyncMonitor
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(DocumentError, match="SyncMonitor: every_n_steps"):
            SyncMonitor(wrong)  # type: ignore[arg-type]
    trainer = import_module("lightning.pytorch").Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=[SyncMonitor()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    with pytest.raises(DocumentError, match="SyncMonitor: the Trainer has no logger"):
        trainer.fit(Plain())
