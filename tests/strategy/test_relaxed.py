"""Relaxed plans under the Trainer: replicas drift, meet again, and nobody waits for ever."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lightning_autosync import AutoSyncStrategy
from lightning_autosync.errors import PlanError

MODES: dict[str, dict[str, Any]] = {
    "partial reduce": {"mode": "partial_reduce", "group_size": 2, "weighting": "dynamic"},
    "local SGD": {"mode": "periodic", "period": 3, "outer": "averaging"},
    "DiLoCo": {"mode": "periodic", "period": 3, "outer": "diloco", "outer_lr": 0.3, "outer_momentum": 0.3},
    "bounded staleness": {"mode": "bounded_staleness", "staleness": 2},
    "asynchronous": {"mode": "asynchronous"},
    "served": {"mode": "synchronous", "served": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_ranks_end_equal_and_have_learned(duo, mode: str) -> None:
    for found in duo.run("relaxed_jobs:train", consistency=MODES[mode], max_epochs=3):
        assert found["apart"] == 0.0
        assert found["finite"]
        assert found["last"] < found["first"]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_servers_that_wait_for_all_are_ddp(duo, momentum: float) -> None:
    assert max(duo.run("relaxed_jobs:against_ddp", consistency=MODES["served"], momentum=momentum)) < 1e-5


@pytest.mark.parametrize("accumulated", [1, 2])
def test_buffers_follow_rank_0_where_servers_wait_for_all(duo, accumulated: int) -> None:
    # Cumulative statistics: every forward pass counts, and a counter that is set back shows. After the last step DDP
    # leaves the other ranks' buffers as they are.
    arguments = {"consistency": MODES["served"], "running": True, "accumulated": accumulated}
    assert duo.run("relaxed_jobs:against_ddp", **arguments)[0] < 1e-5


def test_averaging_after_every_plain_step_is_ddp(duo) -> None:
    every = {"mode": "periodic", "period": 1, "outer": "averaging"}
    assert max(duo.run("relaxed_jobs:against_ddp", consistency=every)) < 1e-5


def test_an_epoch_is_one_pass_of_which_the_faster_rank_takes_more(duo) -> None:
    found = duo.run("relaxed_jobs:train", consistency="asynchronous", learner={"slow": 0.05}, max_epochs=2)[0]
    for fast, slow in zip(*found["seen"], strict=True):
        assert sorted(fast + slow) == list(range(48))
        assert len(fast) > len(slow)


@pytest.mark.parametrize("mode", ["partial reduce", "asynchronous"])
def test_a_rank_that_gets_no_batch_of_a_pass_holds_nobody_up(duo, mode: str) -> None:
    found = duo.run("relaxed_jobs:train", consistency=MODES[mode], samples=4, max_epochs=3)
    assert all(seen["apart"] == 0.0 for seen in found)
    for one, other in zip(*found[0]["seen"], strict=True):
        assert sorted(one + other) == [0, 1, 2, 3]


def test_servers_that_wait_for_all_answer_reductions_in_a_step(duo) -> None:
    for found in duo.run("relaxed_jobs:train", consistency=MODES["served"], learner={"log": "step"}):
        assert found["apart"] == 0.0


@pytest.mark.parametrize("mode", ["local SGD", "served"])
def test_a_checkpoint_resumes_the_same_trajectory(duo, tmp_path, mode: str) -> None:
    distances = duo.run("relaxed_jobs:resume", folder=str(tmp_path), consistency=MODES[mode], momentum=0.9)
    assert max(distances) < 1e-5


@pytest.mark.parametrize("mode", ["partial reduce", "asynchronous"])
def test_ranks_that_drift_resume_equal_and_go_on_learning(duo, tmp_path, mode: str) -> None:
    for found in duo.run("relaxed_jobs:resume_drifting", folder=str(tmp_path), consistency=MODES[mode]):
        assert found["apart"] == 0.0
        assert found["last"] < 0.5 * found["first"]


def test_reductions_at_the_end_of_an_epoch_are_answered(duo) -> None:
    for found in duo.run("relaxed_jobs:train", consistency=MODES["partial reduce"], learner={"log": "epoch"}):
        assert found["apart"] == 0.0


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "reduction in a step": ({"learner": {"log": "step"}}, "ExchangeError: .*inside a training step"),
    "SyncBatchNorm": ({"learner": {"norm": True}}, "PlanError: model: 'layers.1' is a SyncBatchNorm"),
    "validation inside an epoch": ({"val_check_interval": 0.5}, "PlanError: val_check_interval: 0.5"),
    "validation after each batch": ({"val_check_interval": 1}, "PlanError: val_check_interval: 1"),
    "a look at the clock in every step": ({"max_time": "00:01:00:00"}, "PlanError: max_time"),
    "several loaders": ({"two_loaders": True}, "PlanError: train_dataloader: 2 loaders"),
    "unfreezing": (
        {"learner": {"thaw": True}, "consistency": "partial_reduce"},
        "PlanError: model: a parameter was unfrozen",
    ),
}


def test_servers_do_not_clip_each_gradient_for_itself(duo) -> None:
    for error in duo.run("relaxed_jobs:attempt", consistency=MODES["served"], gradient_clip_val=0.5):
        assert "PlanError: gradient_clip_val: 0.5" in error


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_deadlock_is_refused(duo, case: str) -> None:
    arguments, expected = REFUSED[case]
    errors = duo.run("relaxed_jobs:attempt", **{"consistency": MODES["partial reduce"], **arguments})
    assert any(re.search(expected, error) for error in errors), errors
    # Whoever comes there later may find that the other has left.
    assert all(re.search(f"{expected}|PeerLost: rank . is lost: it has left", error) for error in errors), errors


def test_relaxed_semantics_must_be_allowed() -> None:
    with pytest.raises(PlanError, match="semantics are 'relaxed', allowed is 'exact'"):
        AutoSyncStrategy(plan="partial_reduce")
