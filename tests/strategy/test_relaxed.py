"""Relaxed plans under the Trainer: replicas drift, meet again, and nobody waits for ever."""

from __future__ import annotations

import re
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import relaxed_jobs
import torch
import torch.distributed as dist
from models import one_cycle
from sweeps import sweep

from lightning_autosync import AutoSyncStrategy
from lightning_autosync.errors import DocumentError, ExchangeError, PlanError
from lightning_autosync.relaxed.base import Drain
from lightning_autosync.strategy import process_group
from lightning_autosync.strategy.process_group import JobMembers

MODES: dict[str, dict[str, Any]] = {
    "partial reduce": {"mode": "partial_reduce", "group_size": 2, "weighting": "dynamic"},
    "local SGD": {"mode": "periodic", "period": 3, "outer": "averaging"},
    "DiLoCo": {"mode": "periodic", "period": 3, "outer": "diloco", "outer_lr": 0.3, "outer_momentum": 0.3},
    "bounded staleness": {"mode": "bounded_staleness", "staleness": 2},
    "asynchronous": {"mode": "asynchronous"},
    "served": {"mode": "synchronous", "served": True},
}
EVERY_STEP = {"mode": "periodic", "period": 1, "outer": "averaging"}
"""With plain SGD, this is DDP."""


# The others are averaged as DiLoCo or served as with bounded staleness.
@pytest.mark.parametrize("mode", sweep(MODES, ["partial reduce", "DiLoCo", "bounded staleness"]))
def test_ranks_end_equal_and_have_learned(duo, mode: str) -> None:
    for found in duo.run(relaxed_jobs.train, consistency=MODES[mode], max_epochs=3):
        assert found["apart"] == 0.0
        assert found["finite"]
        assert found["last"] < found["first"]


@pytest.mark.parametrize("momentum", sweep([0.0, 0.9], [0.9]))
def test_servers_that_wait_for_all_are_ddp(duo, momentum: float) -> None:
    assert max(duo.run(relaxed_jobs.against_ddp, consistency=MODES["served"], momentum=momentum)) < 1e-5


@pytest.mark.parametrize("consistency", [MODES["served"], EVERY_STEP], ids=["served", "averages"])
def test_steps_of_the_raw_optimizer_are_synchronized(duo, consistency: dict[str, Any]) -> None:
    assert max(duo.run(relaxed_jobs.against_ddp, consistency=consistency, log="raw")) < 1e-5


@pytest.mark.parametrize("accumulated", sweep([1, 2], [2]))
def test_buffers_follow_rank_0_where_servers_wait_for_all(duo, accumulated: int) -> None:
    # Cumulative statistics: every forward pass counts, and a counter that is set back shows. After the last step DDP
    # leaves the other ranks' buffers as they are.
    arguments = {"consistency": MODES["served"], "running": True, "accumulated": accumulated}
    assert duo.run(relaxed_jobs.against_ddp, **arguments)[0] < 1e-5


def test_averaging_after_every_plain_step_is_ddp(duo) -> None:
    assert max(duo.run(relaxed_jobs.against_ddp, consistency=EVERY_STEP)) < 1e-5


def test_an_epoch_is_one_pass_of_which_the_faster_rank_takes_more(duo) -> None:
    found = duo.run(relaxed_jobs.train, consistency="asynchronous", learner={"slow": 0.05}, max_epochs=2)[0]
    for fast, slow in zip(*found["seen"], strict=True):
        assert sorted(fast + slow) == list(range(48))
        assert len(fast) > len(slow)


def test_a_loader_that_cannot_be_dealt_out_is_named(duo) -> None:
    first, second = duo.run(relaxed_jobs.warned, weighted=True)
    assert any(text.startswith("train_dataloader: the batches of a WeightedRandomSampler") for text in first), first
    assert not any(text.startswith("train_dataloader") for text in second)


@pytest.mark.parametrize("mode", sweep(["partial reduce", "asynchronous"], ["asynchronous"]))
def test_a_rank_that_comes_late_to_a_pass_still_gets_a_batch_and_validates(duo, mode: str) -> None:
    # By the time rank 1 asks, rank 0 has asked for both batches.
    arguments = {"learner": {"late": 0.3}, "samples": 8, "max_epochs": 3}
    found = duo.run(relaxed_jobs.train, consistency=MODES[mode], **arguments)
    assert all(seen["apart"] == 0.0 for seen in found)
    assert found[0]["validations"] == [3, 3]
    for one, other in zip(*found[0]["seen"], strict=True):
        assert len(one) == len(other) == 4
        assert sorted(one + other) == list(range(8))


def test_schedules_follow_the_progress_of_the_job_and_not_a_ranks_own_steps(duo) -> None:
    found = duo.run(relaxed_jobs.train, consistency="asynchronous", learner={"slow": 0.05}, max_epochs=2)[0]
    fast, slow = found["counts"]
    assert fast["own"] > fast["progress"] > slow["own"]
    for counts in (fast, slow):
        # The same on all ranks, as names of checkpoints must be.
        assert counts["global"] == counts["progress"] == fast["progress"]
        # 12 batches an epoch; where one rank is done before the other, progress goes beyond what was planned.
        assert counts["scheduler"] == min(counts["progress"], 12)


@pytest.mark.parametrize(
    ("mode", "accumulated", "steps"),
    [
        ("partial reduce", 1, 12),
        ("asynchronous", 2, 6),
        pytest.param("bounded staleness", 1, 12, marks=pytest.mark.slow),
    ],
)
def test_schedules_can_be_made_for_the_steps_of_a_training(duo, mode: str, accumulated: int, steps: int) -> None:
    arguments = {"learner": {"cycle": True}, "max_epochs": 2, "accumulate_grad_batches": accumulated}
    for found in duo.run(relaxed_jobs.train, consistency=MODES[mode], **arguments):
        for counts in found["counts"]:
            # Whatever ranks took beyond it at the end of an epoch, no schedule goes beyond what it was made for.
            assert (counts["total"], counts["scheduler"]) == (steps, steps)
            assert counts["rates"] == pytest.approx(last_rates(steps))


def last_rates(steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.02)
    schedule = one_cycle(optimizer, steps)
    for _ in range(steps):
        optimizer.step()
        schedule.step()
    return schedule.get_last_lr()


@pytest.mark.parametrize("when", sweep(["step", "end of batch"], ["end of batch"]))
def test_servers_that_wait_for_all_answer_reductions_in_each_step(duo, when: str) -> None:
    for found in duo.run(relaxed_jobs.train, consistency=MODES["served"], learner={"log": when}):
        assert found["apart"] == 0.0


@pytest.mark.parametrize("mode", ["local SGD", "served"])
def test_a_checkpoint_resumes_the_same_trajectory(duo, tmp_path, mode: str) -> None:
    distances = duo.run(relaxed_jobs.resume, folder=str(tmp_path), consistency=MODES[mode], momentum=0.9)
    assert max(distances) < 1e-5


@pytest.mark.slow  # the next test resumes ranks that drift, too
@pytest.mark.parametrize("mode", ["partial reduce", "asynchronous"])
def test_ranks_that_drift_resume_equal_and_go_on_learning(duo, tmp_path, mode: str) -> None:
    for found in duo.run(relaxed_jobs.resume_drifting, folder=str(tmp_path), consistency=MODES[mode]):
        assert found["apart"] == 0.0
        assert found["last"] < 0.5 * found["first"]


def test_ranks_that_drift_go_on_from_their_own_momenta_and_the_progress_of_the_job(duo, tmp_path) -> None:
    for found in duo.run(relaxed_jobs.resume_positions, folder=str(tmp_path), consistency=MODES["partial reduce"]):
        saved, begun = found["progress"]
        assert begun == saved >= 12
        assert found["kept"]
        assert not found["alike"]


SERVED = MODES["served"]


@pytest.mark.parametrize(("first", "second"), [(None, SERVED), (SERVED, None)], ids=["to servers", "from servers"])
def test_the_state_of_the_optimizer_moves_to_servers_and_back(duo, tmp_path, first: Any, second: Any) -> None:
    for found in duo.run(relaxed_jobs.resume_as, folder=str(tmp_path), first=first, second=second):
        assert found["distance"] < 1e-5
        # Steps made before count on, whoever counted them.
        assert found["steps"][0] == found["steps"][1]


def test_a_checkpoint_of_another_version_is_refused(duo, tmp_path) -> None:
    for error in duo.run(relaxed_jobs.resume_old, folder=str(tmp_path)):
        assert "PlanError: checkpoint: its state is 'autosync-relaxed/1', but this version reads" in error


@pytest.mark.parametrize("mode", sweep(["partial reduce", "asynchronous"], ["partial reduce"]))
def test_collectives_are_answered_wherever_all_ranks_come(duo, tmp_path, mode: str) -> None:
    for found in duo.run(relaxed_jobs.everywhere, folder=str(tmp_path), consistency=MODES[mode]):
        assert found["apart"] == 0.0
        assert found["kept"] == 2


@pytest.mark.parametrize("mode", sweep(["local SGD", "bounded staleness"], ["bounded staleness"]))
def test_checkpoints_and_validation_inside_an_epoch_of_equal_shares(duo, tmp_path, mode: str) -> None:
    for found in duo.run(relaxed_jobs.inside, folder=str(tmp_path), consistency=MODES[mode]):
        assert found["apart"] == 0.0
        assert found["validations"] == [4, 4]
        assert found["kept"] == 2


def test_ranks_count_the_same_steps_even_if_one_starts_late(duo) -> None:
    for found in duo.run(relaxed_jobs.steps_with_a_late_start, consistency=MODES["bounded staleness"]):
        assert found == [[3, 6, 9, 12]] * 2


def test_time_outs_reach_the_mesh_and_the_groups(duo) -> None:
    for seen in duo.run(relaxed_jobs.patience):
        assert seen == {"longest": 33.0, "interval": 0.25, "stall": 17.0}


def test_reductions_at_the_end_of_an_epoch_are_answered(duo) -> None:
    for found in duo.run(relaxed_jobs.train, consistency=MODES["partial reduce"], learner={"log": "epoch"}):
        assert found["apart"] == 0.0


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "reduction in a step": ({"learner": {"log": "step"}}, "ExchangeError: .*inside a training step"),
    "closures": (
        {"learner": {"lbfgs": True}},
        "optimizer: LBFGS.step needs a closure, but under mode 'partial_reduce'",
    ),
    "reduction after a step by hand": (
        {"learner": {"log": "manual"}, "consistency": MODES["local SGD"]},
        "ExchangeError: .*inside a training step",
    ),
    "reduction after a batch": (
        {"learner": {"log": "end of batch"}},
        "ExchangeError: sync_dist.*between training steps",
    ),
    "reduction after a batch of equal shares": (
        {"learner": {"log": "end of batch"}, "consistency": MODES["local SGD"]},
        "ExchangeError: sync_dist.*between training steps",
    ),
    "reduction after a batch that servers count": (
        {"learner": {"log": "end of batch"}, "consistency": MODES["bounded staleness"]},
        "ExchangeError: sync_dist.*between training steps",
    ),
    "a collective of its own in a step": (
        {"learner": {"log": "own"}},
        "ExchangeError: torch.distributed.all_reduce inside a training step",
    ),
    "a collective of its own after a batch": (
        {"learner": {"log": "own, after"}},
        "ExchangeError: torch.distributed.all_reduce between training steps",
    ),
    "a metric of all ranks in a step": (
        {"learner": {"log": "metric"}, "consistency": MODES["bounded staleness"]},
        "ExchangeError: torch.distributed.barrier inside a training step",
    ),
    "checkpoint after a batch": (
        {"learner": {"log": "checkpoint"}},
        "ExchangeError: a checkpoint between training steps",
    ),
    "an end by a rank's own steps": ({"max_steps": 5}, "PlanError: max_steps: 5"),
    "a least number of a rank's own steps": ({"min_steps": 5}, "PlanError: min_steps: 5"),
    "a rank's own number of batches": ({"limit_train_batches": 3}, "PlanError: limit_train_batches: 3"),
    "a share of a rank's own batches": ({"limit_train_batches": 0.5}, "PlanError: limit_train_batches: 0.5"),
    "fewer batches than ranks": ({"samples": 4}, "PlanError: train_dataloader: 4 samples make 1 batches of 4"),
    "a plateau of steps": ({"learner": {"plateau": True}}, "PlanError: lr_scheduler: ReduceLROnPlateau"),
    "SyncBatchNorm": ({"learner": {"norm": True}}, "PlanError: model: 'layers.1' is a SyncBatchNorm"),
    "validation inside an epoch": ({"val_check_interval": 0.5}, "PlanError: val_check_interval: 0.5"),
    "validation after each batch": ({"val_check_interval": 1}, "PlanError: val_check_interval: 1"),
    "a look at the clock in every step": ({"max_time": "00:01:00:00"}, "PlanError: max_time"),
    "several loaders": ({"two_loaders": True}, "PlanError: train_dataloader: 2 loaders"),
    "unfreezing": (
        {"learner": {"thaw": True}, "consistency": "partial_reduce"},
        "PlanError: model: a parameter was unfrozen",
    ),
    "replacing": (
        {"learner": {"replace": True}, "consistency": "partial_reduce"},
        "PlanError: model: parameter 'layers.0.bias' was added, removed, replaced or converted",
    ),
    "converting": (
        {"learner": {"convert": True}, "consistency": "partial_reduce"},
        "PlanError: model: parameter 'layers.0.weight' was added, removed, replaced or converted",
    ),
}


def test_servers_do_not_clip_each_gradient_for_itself(duo) -> None:
    for error in duo.run(relaxed_jobs.attempt, consistency=MODES["served"], gradient_clip_val=0.5):
        assert "PlanError: gradient_clip_val: 0.5" in error


@pytest.mark.parametrize("mode", sweep(MODES, ["partial reduce", "DiLoCo", "served"]))
def test_a_finder_of_learning_rates_is_refused(duo, mode: str) -> None:
    for error in duo.run(relaxed_jobs.search_rate, consistency=MODES[mode], own=False):
        assert error.startswith("PlanError: callbacks: LearningRateFinder trains before the job does")


def test_a_second_begin_of_training_within_fit_is_refused(duo) -> None:
    for error in duo.run(relaxed_jobs.search_rate, consistency=MODES["DiLoCo"], own=True):
        assert error.startswith("PlanError: training begins twice within one fit(); mode 'periodic' allows that once")


# Relatives of others.
LONG = (
    "reduction after a step by hand", "reduction after a batch of equal shares", "a share of a rank's own batches",
    "reduction after a batch that servers count", "a collective of its own after a batch", "replacing",
    "a least number of a rank's own steps", "validation after each batch", "a look at the clock in every step",
    "several loaders",
)  # fmt: skip


@pytest.mark.parametrize("case", sweep(REFUSED, [case for case in REFUSED if case not in LONG]))
def test_what_would_deadlock_is_refused(duo, case: str) -> None:
    arguments, expected = REFUSED[case]
    errors = duo.run(relaxed_jobs.attempt, **{"consistency": MODES["partial reduce"], **arguments})
    assert any(re.search(expected, error) for error in errors), errors
    # Whoever comes there later may find that the other has left.
    assert all(re.search(f"{expected}|PeerLost: rank . is lost: it has left", error) for error in errors), errors


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"heartbeat": {"pulse": 1.0}}, DocumentError, "heartbeat.pulse: not known; allowed: interval, shortest"),
        ({"heartbeat": {"longest": "soon"}}, DocumentError, "heartbeat.longest: 'soon' is not a finite number"),
        (
            {"heartbeat": {"longest": 1.0}},
            DocumentError,
            "heartbeat: expected 0 < interval < shortest <= longest; got interval 0.5 s, shortest 5 s, longest 1 s",
        ),
        ({"heartbeat": 3.0}, DocumentError, "heartbeat: expected a mapping"),
        ({"timeout": "soon"}, DocumentError, "timeout: 'soon' is not a finite number above 0"),
        ({"timeout": -1}, DocumentError, "timeout: -1 is not a finite number above 0"),
        ({"stall": 0}, DocumentError, "stall: 0 is not a finite number above 0"),
        (
            {"plan": "all_reduce", "stall": 9.0},
            ValueError,
            "stall: it has no effect, because ranks make all steps of this plan together",
        ),
    ],
)
def test_time_outs_that_make_no_sense_are_refused(arguments: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        AutoSyncStrategy(**{"plan": "partial_reduce", "semantics": "relaxed", **arguments})


@pytest.mark.parametrize("timeout", [90, 90.0, timedelta(seconds=90)])
def test_seconds_are_a_time_out_as_good_as_a_duration(timeout: Any) -> None:
    strategy = AutoSyncStrategy(timeout=timeout)
    assert (strategy._settings.timeout, strategy._timeout) == (90.0, timedelta(seconds=90))


@pytest.mark.parametrize("argument", [{"static_graph": True}, {"gradient_as_bucket_view": True}, {"check_replicas": 5}])
def test_settings_of_synchronized_gradients_are_refused(argument: Any) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(argument))}: it has no effect, because gradients are not"):
        AutoSyncStrategy(plan="partial_reduce", semantics="relaxed", **argument)


def test_relaxed_semantics_must_be_allowed() -> None:
    with pytest.raises(PlanError, match="semantics are 'relaxed', but the strategy allows at most 'exact'"):
        AutoSyncStrategy(plan="partial_reduce")


def test_a_rank_that_did_not_come_where_servers_need_all_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have left in good order, of which no loss tells."""
    monkeypatch.setattr(process_group.dist, "get_world_size", lambda: 3)
    mesh: Any = SimpleNamespace(rank=0, error=None)
    mesh.on_loss = mesh.on_join = mesh.subscribe = lambda *_: None
    members = JobMembers(mesh, dist.HashStore(), 3, needs_all=True, timeout=1.0)
    members.follow(Drain(1, {0: 1, 1: 1}))
    with pytest.raises(ExchangeError, match=r"a barrier needs all ranks, but rank 2 is lost \(it did not join"):
        members.check("a barrier")
