"""Batch shares: ranks compute unequal parts of global batches, with the result of one process."""

from __future__ import annotations

from typing import Any

import pytest
import share_jobs
import share_state_jobs
from share_jobs import SAMPLES
from sweeps import sweep

OTHER = {"framework": "pytorch_lightning", "plan": "ps"}


OVERLAP, MICRO = {"overlap": "step"}, {"overlap": "step", "micro_batch": 2}


@pytest.mark.parametrize(
    "options", sweep([{}, OVERLAP, OTHER, MICRO, {**OTHER, "micro_batch": 1}], [{}, MICRO]), ids=str
)
def test_a_trainer_equals_one_process(quartet, options: dict[str, Any]) -> None:
    found = quartet.run(share_jobs.trainer_against_one_process, **options)
    for each in found:
        assert each["distance"] < 1e-6 < 0.1 < each["moved"]
        assert each["steps"] > 50
    assert max(each["largest"] for each in found) == options.get("micro_batch", 8)


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"micro_batch": 2}],  # trials without are tested in test_job_tuning
    ids=str,
)
def test_a_job_that_tries_other_plans_equals_one_process(quartet, options: dict[str, int]) -> None:
    for found in quartet.run(share_jobs.tuned_against_one_process, **options):
        assert found["distance"] < 1e-6 < 0.1 < found["moved"]
        assert found["switches"] > 2


PLAIN, METHOD, PARTS = {"plain_backward": True}, {"plain_backward": False}, {"plain_backward": False, "micro_batch": 2}


@pytest.mark.parametrize("options", sweep([PLAIN, METHOD, PARTS], [PLAIN, PARTS]), ids=str)
def test_fabric_equals_one_process(quartet, options: dict[str, Any]) -> None:
    found = quartet.run(share_jobs.fabric_against_one_process, **options)
    for each in found:
        assert each["distance"] < 1e-6 < 0.1 < each["moved"]
    assert max(each["largest"] for each in found) == options.get("micro_batch", 8)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_stream_that_all_ranks_read_is_cut(quartet, workers: int) -> None:
    for found in quartet.run(share_jobs.samples_by_epoch, sampler="stream", workers=workers):
        assert found == [list(range(80))] * 2


@pytest.mark.parametrize("sampler", ["shuffle", "global"])
def test_each_sample_counts_once_in_an_epoch(quartet, sampler: str) -> None:
    arguments = {} if sampler == "shuffle" else {"use_distributed_sampler": False}
    for found in quartet.run(share_jobs.samples_by_epoch, sampler=sampler, **arguments):
        assert found == [list(range(SAMPLES))] * 2


def test_a_sampler_with_random_numbers_draws_the_same_on_all_ranks(quartet) -> None:
    for first, second in quartet.run(share_jobs.samples_by_epoch, sampler="weighted"):
        assert len(first) == len(set(first)) == len(second) == len(set(second)) == 40
        assert first != second


@pytest.mark.parametrize("options", sweep([{}, {"micro_batch": 2}], [{"micro_batch": 2}]), ids=str)
def test_logged_means_count_samples(quartet, options: dict[str, int]) -> None:
    for found in quartet.run(share_jobs.logged, **options):
        assert found["step"][0] == pytest.approx(found["step"][1])
        assert found["epoch"][0] == pytest.approx(found["epoch"][1])


@pytest.mark.parametrize("options", sweep([{}, {"micro_batch": 2}], [{"micro_batch": 2}]), ids=str)
def test_losses_that_are_means_over_terms_are_weighted_by_the_module(quartet, options: dict[str, int]) -> None:
    for found in quartet.run(share_jobs.means_over_terms, **options):
        assert found["distance"] < 1e-6
        assert not found["warnings"]


def test_other_losses_that_are_means_over_terms_are_warned_of(quartet) -> None:
    first, *others = quartet.run(share_jobs.means_over_terms, counts=False)
    assert first["distance"] > 1e-3
    assert any("with ignored targets" in text for text in first["warnings"])
    assert not any(each["warnings"] for each in others)


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({"batch_shares": (2, 2, 2, 4)}, True),
        ({"batch_shares": (2, 2, 2, 4), "fabric": True}, True),
        ({"batch_shares": "auto"}, True),
        ({"batch_shares": (2, 2, 2, 4), "fabric": True, "synchronized": True}, False),
        ({"batch_shares": (2, 2, 2, 4), "micro_batch": 2}, False),
        ({"batch_shares": (1, 1, 1, 1)}, False),
    ],
    ids=str,
)
def test_batch_norm_of_unequal_batches_is_warned_of_once(quartet, options: dict[str, Any], warns: bool) -> None:
    first, *others = quartet.run(share_jobs.trains_with_batch_norm, **options)
    assert [text for text in first if "BatchNorm1d" in text] == first
    assert len(first) == warns
    assert not any(others)


@pytest.mark.parametrize(
    "arguments",
    [
        {"begin": 9},
        {"begin": 9, "workers": 1},  # which draws two batches ahead
        pytest.param({"begin": 30, "workers": 2}, marks=pytest.mark.slow),
        {"begin": 9, "fabric": True},
        # With overlap, while plans are tried, in the next test.
        pytest.param({"begin": 9, "overlap": "step"}, marks=pytest.mark.slow),
        pytest.param({"begin": 9, "overlap": "step", "fabric": True}, marks=pytest.mark.slow),
        pytest.param({"begin": 25, "sampler": "stream"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_rank_that_slows_down_gets_fewer_samples_within_20_steps(quartet, arguments: dict[str, Any]) -> None:
    for found in quartet.run(share_jobs.slows_down, **arguments):
        begin = arguments["begin"]
        assert set(found["samples"][:begin]) == {4}
        assert set(found["samples"][begin + 20 : -1]) <= {1, -1}
        assert not found["lost"]


def test_shares_follow_speed_while_plans_are_tried_on_steps_that_overlap(quartet) -> None:
    for found in quartet.run(share_jobs.slows_down_in_trials, begin=25):
        assert set(found["samples"][:25]) == {4}
        assert set(found["samples"][45:-1]) <= {1, -1}
        assert found["switches"] >= 2
        assert not found["lost"]


def test_shares_follow_speed_under_a_plan_that_waits_in_a_job_that_could_overlap(quartet) -> None:
    for found in quartet.run(share_jobs.slows_down_waiting, begin=9):
        assert set(found["samples"][:9]) == {4}
        assert set(found["samples"][29:-1]) <= {1, -1}
        assert not found["lost"]


def test_shares_of_micro_batches_follow_speed(quartet) -> None:
    for found in quartet.run(share_jobs.micro_batches_follow_speed):
        assert found["samples"][0] == 4
        assert set(found["samples"][20:]) == {2}
        assert not found["lost"]
        first, *changes = found["shares"]
        why = first["why"]
        assert why.startswith("equal")
        assert first == {"data_pass": 1, "batch": 0, "shares": [0.25] * 4, "why": why}
        assert f"batch shares at first: 25.0%, 25.0%, 25.0%, 25.0% for ranks 0 to 3 ({why})" in found["report"]
        assert changes[-1]["shares"][-1] == 2 / 16
        assert all(sum(each["shares"]) == pytest.approx(1) and 0 < each["batch"] < 20 for each in changes)
        assert f"batch shares from batch {changes[0]['batch']} of pass 1 over the data on: " in found["report"]


def test_a_micro_batch_that_does_not_divide_the_batch_is_refused_before_a_plan_is_chosen(quartet) -> None:
    for found in quartet.run(share_jobs.micro_batch_that_does_not_divide):
        assert found["error"].startswith("micro_batch: 3 does not divide 16, the number of samples in a global batch ")
        assert not found["chosen"]


@pytest.mark.parametrize(("direct", "what"), [(True, "an operation of torch.distributed"), (False, "all_gather")])
def test_a_micro_batch_with_a_collective_operation_is_refused(quartet, direct: bool, what: str) -> None:
    for found in quartet.run(share_jobs.calls_within_a_micro_batch, direct=direct):
        assert found.startswith(f"micro_batch: training_step calls {what}, but ranks compute different numbers")


def test_operations_of_this_package_on_another_thread_are_no_direct_calls(quartet) -> None:
    for found in quartet.run(share_jobs.calls_on_another_thread):
        assert found["own"] == 0 < found["user"]


def test_fabric_refuses_batches_that_are_not_divided(quartet) -> None:
    for found in quartet.run(share_jobs.forgets_micro_batches):
        assert found.startswith("micro_batch: a gradient arrived of a batch that was not divided")


def test_fabric_refuses_synchronized_batch_norm_with_micro_batches(quartet) -> None:
    for found in quartet.run(share_jobs.synchronized_batch_norm_in_fabric):
        assert found.startswith("micro_batch: '1' is a SyncBatchNorm, which needs all ranks in each forward pass")


def test_trainings_that_overlap_share_a_process_group(quartet) -> None:
    assert quartet.run(share_jobs.groups_of_two_trainings) == [0] * 4


@pytest.mark.parametrize("where", sweep(["forward", "backward"], ["backward"]))
def test_a_rank_without_memory_computes_in_parts_and_gets_a_smaller_share(quartet, where: str) -> None:
    for found in quartet.run(share_jobs.runs_out_of_memory, where=where):
        assert found["distance"] < 1e-6
        assert found["samples"] == [1, 1, 1]
        assert found["loss"] > 0


@pytest.mark.parametrize("where", sweep(["forward", "backward"], ["backward"]))
def test_a_rank_without_memory_for_a_micro_batch_gets_fewer_of_them(quartet, where: str) -> None:
    for found in quartet.run(share_jobs.runs_out_of_memory, where=where, micro_batch=2):
        assert found["distance"] < 1e-6
        assert found["samples"] == [1, 1, 1]
        assert found["share"] == 2
        assert found["loss"] > 0


def test_speeds_are_those_of_a_single_module(quartet) -> None:
    assert quartet.run(share_jobs.second_module)[0].startswith("batch_shares='auto': a batch is timed for one module")


def test_parameters_that_begin_to_train_within_an_accumulation_are_weighted(quartet) -> None:
    for found in quartet.run(share_jobs.thaws_while_gradients_accumulate):
        assert found["distance"] < 1e-6 < 0.001 < found["moved"]


def test_unequal_tensors_are_not_gathered_within_a_step(quartet) -> None:
    for found in quartet.run(share_jobs.gathers_within_a_step):
        assert found.startswith("batch_shares: training_step gathers tensors with 2 to 8 elements")


def test_batch_samplers_have_the_same_length_on_all_ranks(quartet) -> None:
    for found in quartet.run(share_jobs.batch_samplers_of_different_lengths):
        assert found.startswith("batch_shares: the batch sampler in GlobalBatches has 1 to 2 batches")


def test_an_overflow_on_one_rank_skips_the_step_on_all_but_one_without_samples_does_not(quartet) -> None:
    for found in quartet.run(share_state_jobs.overflows):
        assert found["scale"] == 2.0**8  # halved once in each of two epochs
        assert found["distance"] < 1e-6


def test_sparse_gradients_are_weighted(quartet) -> None:
    for found in quartet.run(share_state_jobs.sparse_rows):
        assert found["distance"] < 1e-6 < 0.1 < found["moved"]


@pytest.mark.parametrize("compressor", sweep(["int8", "bf16"], ["int8"]))
def test_error_feedback_keeps_what_weighted_gradients_lost(quartet, compressor: str) -> None:
    for found in quartet.run(share_state_jobs.error_feedback, compressor=compressor):
        assert found["residual"] > 1e-4
        assert found["unexplained"] < 1e-5


@pytest.mark.parametrize("shares", sweep(["auto", (4, 2, 1, 1)], ["auto"]), ids=str)
def test_a_job_that_changed_its_shares_resumes_in_mid_epoch(quartet, tmp_path, shares) -> None:
    for found in quartet.run(share_state_jobs.resumes_in_mid_epoch, folder=str(tmp_path), shares=shares):
        assert (found["before"][0], found["before"][-1]) == (4, 1)
        assert (found["after"][0], found["after"][-1]) == ((4, 1) if shares == "auto" else (2, 2))
        assert found["distance"] < 1e-6
