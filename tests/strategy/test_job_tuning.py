"""A job that tunes itself ends where DDP ends, however often it switches between plans."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import tuning_jobs
from clusters import two_interfaces
from sweeps import sweep

from lightning_autosync.search.memory import TuningCache

CASES: dict[str, dict[str, Any]] = {
    "plain": {"model": "Plain"},
    "accumulation": {"model": "Plain", "accumulate_grad_batches": 2},
    "clipping by norm": {"model": "Plain", "gradient_clip_val": 0.05},
    "bf16-mixed": {"model": "Plain", "precision": "bf16-mixed"},
    "gradient scaler": {"model": "Plain", "half": True},
    "frozen": {"model": "Frozen"},
    "unused": {"model": "Unused"},
    "tied": {"model": "Tied"},
    "buffers": {"model": "Normalized"},
    "two optimizers": {"model": "Adversarial"},
    "thawing": {"model": "Thaws", "reference": "ThawsLate"},
    # Without time, the search finds no plan that is worth a trial; it ends by itself after a second.
    "large embedding": {"model": "DenseTable", "strategy": {"tuning": {**asdict(tuning_jobs.SHORT), "search": 60.0}}},
    "views of buffers": {"model": "Plain", "strategy": {"gradient_as_bucket_view": True}},
    "static graph": {"model": "Plain", "strategy": {"static_graph": True}},
}

SHORT = ["accumulation", "gradient scaler"]

MIXED: dict[str, dict[str, Any]] = {
    "accumulation and clipping": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "max_epochs": 10},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "gradient scaler and overflows": {"half": True},
}


@pytest.mark.parametrize("case", sweep(CASES, SHORT))
def test_equals_ddp_with_many_switches(duo, case: str) -> None:
    for found in duo.run(tuning_jobs.compare, **CASES[case]):
        assert found["distance"] < 1e-5
        assert found["moved"] > 1e-3
        assert found["switches"] >= 10


@pytest.mark.slow
@pytest.mark.parametrize("case", MIXED)
def test_is_bit_equal_to_a_fixed_plan_after_many_steps_and_switches(duo, case: str) -> None:
    """With two ranks, each sum has two terms, whose order does not matter."""
    for found in duo.run(tuning_jobs.compare_with_fixed, **MIXED[case]):
        assert found["distance"] == 0.0
        assert found["finite"]
        assert found["switches"] >= 30
        assert found["plans"] >= 3
        still = {name.split(".")[0] for name, moved in found["moved"].items() if moved == 0}
        assert still == {"frozen", "never"}
        if MIXED[case].get("half"):
            assert 0 < found["scale"] < 1.0  # it began with 2**10, and halved in each step that overflowed


@pytest.mark.parametrize("overlap", [None, "step"])
def test_what_compression_has_lost_stays_with_its_variable_across_switches(overlap: str | None, duo) -> None:
    for found in duo.run(tuning_jobs.compressed_switches, overlap=overlap):
        assert found["distance"] == 0.0
        assert found["switches"] >= 10
        assert found["lost"] > 1e-4


def test_a_checkpoint_in_a_trial_has_what_compression_has_lost(duo) -> None:
    first, _ = duo.run(tuning_jobs.checkpoints_in_trials)  # rank 0 writes it
    assert {compressed for compressed, _ in first} == {True, False}
    assert all(saved for _, saved in first)


def test_a_plan_that_a_rank_cannot_open_is_given_up_on_all_ranks(duo) -> None:
    for found in duo.run(tuning_jobs.unopenable, at_first=False):
        assert found["distance"] < 1e-5
        assert found["report"]["tuning"].startswith("ended")
        told = [line for line in found["logged"] if "is not tried, because ranks cannot set it up: rank " in line]
        assert told
        assert all("rank 1" in line and "Training continues with all_reduce" in line for line in told)


def test_a_plan_for_which_a_rank_has_no_memory_is_given_up_on_all_ranks(duo) -> None:
    for found in duo.run(tuning_jobs.without_memory):
        assert found["distance"] < 1e-5
        assert found["trials"] == 0
        assert any("cannot set it up: rank 1: its host has 0 B of memory left" in line for line in found["logged"])


def test_no_step_waits_until_a_plan_is_open(duo) -> None:
    for found in duo.run(tuning_jobs.slowly_opened):
        assert found["during"] == [True]
        assert found["trials"] == 1


def test_all_is_closed_and_the_error_is_told_if_closing_a_plan_fails(duo) -> None:
    for found in duo.run(tuning_jobs.broken_closing):
        assert found == {"error": "a test says so", "opened": 2, "left": 0, "groups": 0}


def test_a_plan_that_was_tried_leaves_no_buffers_in_memory(duo) -> None:
    for counts in duo.run(tuning_jobs.kept_in_memory):
        *during, after = counts
        assert len(during) >= 3
        assert set(during) == {1}
        assert after == 0


@pytest.mark.slow
def test_a_job_that_cannot_open_its_first_plan_begins_with_that_of_ddp_and_remembers_nothing(duo, tmp_path) -> None:
    for found in duo.run(tuning_jobs.unopenable, at_first=True, folder=str(tmp_path)):
        assert found["distance"] < 1e-5
        assert "fused native all-reduce, because ranks cannot set up " in found["report"]["reason"]
        assert "rank 1" in found["report"]["reason"]
        assert found["report"]["tuning"].startswith("ended")
    assert list(TuningCache(tmp_path).entries()) == []


def test_all_ranks_end_with_the_same_plan_and_say_so(duo) -> None:
    found = duo.run(tuning_jobs.outcome)
    assert found[0] == found[1]
    assert found[0]["done"].startswith("ended")
    assert found[0]["report"]["plan"] == found[0]["plan"]
    assert found[0]["trials"] >= 1


def test_plans_are_not_tried_with_tuning_off(duo) -> None:
    assert all(each == 0 for each in duo.run(tuning_jobs.switches_with, tuning="off"))


def test_plans_are_tried_on_steps_that_overlap_and_on_steps_that_wait(duo) -> None:
    for found in duo.run(tuning_jobs.overlapping_trials):
        assert found["distance"] == 0.0
        assert found["switches"] >= 10
        assert all(waited for waits, waited in found["passes"] if waits)
        changes = zip(found["passes"][1:], found["passes"], strict=False)
        assert {(False, True), (True, False)} <= {(one[1], other[1]) for one, other in changes}


@pytest.mark.parametrize("waiting", [True, False])
def test_a_job_ends_waiting_or_with_overlap_and_later_jobs_begin_so(duo, tmp_path, waiting: bool) -> None:
    for first, second, given in duo.run(tuning_jobs.remembered_overlap, folder=str(tmp_path), waiting=waiting):
        assert first["distance"] == second["distance"] == given["distance"] == 0.0
        assert first["report"]["tuning"].startswith("ended")
        assert first["waited"][0]  # its computation is measured
        assert not all(first["waited"])
        assert first["waited"][-1] == second["waited"][0] == second["waited"][-1] == waiting
        assert "which an earlier job found on" in second["report"]["reason"]
        assert (given["late"] == 0) == waiting
        for found in (first, second, given):
            assert found["report"]["overlaps"] == (not waiting)
            words = "none: steps wait at the end of the backward pass" if waiting else "with the next forward pass"
            assert f"\noverlap: {words}\n" in found["told"]
        assert (second["late"] == 0) == waiting
    (entry,) = TuningCache(tmp_path).entries()
    assert entry.entry is not None
    assert entry.entry.plan.waits == waiting


@pytest.mark.parametrize("model", ["Plain", "ReadsOnRankZero", "ReadsGradients"])
def test_gradients_are_clipped_by_norm_while_plans_are_tried(duo, model: str) -> None:
    for found in duo.run(tuning_jobs.compare, model=model, strategy={"overlap": "step"}, gradient_clip_val=0.05):
        assert found["distance"] < 1e-5
        assert found["switches"] >= 10


def test_steps_that_overlap_wait_for_predictions_of_rank_0_only_at_their_end(duo) -> None:
    """Elsewhere, ranks may be at different places of their programs, and wait for each other in collective calls."""
    for found in duo.run(tuning_jobs.taken_predictions):
        assert found["taken"] == [False]
        assert any(found["overlapped"])


@pytest.mark.parametrize("options", [{}, {"overlap": "step"}], ids=str)
def test_the_steps_by_which_plans_are_predicted_tell_when_each_gradient_was_ready(duo, options: dict[str, Any]) -> None:
    first, second = duo.run(tuning_jobs.times_of_gradients, **options)
    assert first["predicted"]
    assert set(first["predicted"]) == {first["parameters"]}
    assert second["predicted"] == []  # rank 0 predicts
    assert first["last"] == second["last"] == 0


@pytest.mark.parametrize("options", [{"tuning": asdict(tuning_jobs.SHORT)}, {"tuning": "off"}], ids=["tuning", "off"])
def test_a_job_does_without_interfaces_that_have_no_address(duo, options: dict[str, Any]) -> None:
    cluster = two_interfaces([1e8] * 2, [1e8] * 2, [("127.0.0.1", "127.0.0.2"), ("127.0.0.1",)]).to_dict()
    for found in duo.run(tuning_jobs.without_addresses, cluster=cluster, **options):
        assert found["distance"] < 1e-5
        assert found["interfaces"] in ([], [0])
        assert found["nodes"] == 2
        (told,) = found["warned"]
        assert told.startswith(
            "cluster 'two_interfaces': nodes[1].interfaces[1].address: missing, so plans use 1 network "
        )


@pytest.mark.parametrize("options", sweep([{}, {"overlap": "step"}], [{"overlap": "step"}]), ids=str)
def test_fabric_equals_ddp_with_many_switches(duo, options: dict[str, Any]) -> None:
    for found in duo.run(tuning_jobs.fabric, **options):
        assert found["distance"] < 1e-5
        assert found["switches"] >= 10


def test_fabric_tunes_while_passes_reach_modules_in_any_order(duo) -> None:
    for found in duo.run(tuning_jobs.fabric_with_modules_in_any_order):
        assert found["found"] == pytest.approx(found["expected"], abs=1e-6)
        assert found["switches"] >= 2


@pytest.mark.parametrize("described", [True, False], ids=["described", "measured"])
def test_a_second_job_starts_with_the_plan_that_the_first_one_found(duo, tmp_path, described: bool) -> None:
    for first, second in duo.run(tuning_jobs.remembered, folder=str(tmp_path), described=described):
        assert first["tuning"].startswith("ended")
        assert first["trials"]
        assert "which an earlier job found on" in second["reason"]
        assert second["first"] == first["plan"]
        assert len(second["candidates"]) <= 2
        assert second["costs"]  # of its hosts, which it has measured
        assert ("described" in second["links"]) == described
    (entry,) = TuningCache(tmp_path).entries()
    assert entry.entry is not None
    assert entry.entry.plan.fingerprint == second["plan"]  # the first one's, unless DDP's was faster this time
    assert entry.entry.cluster.name == "pair"


@pytest.mark.parametrize("options", sweep([{}, {"cluster": None}, {"overlap": "step"}], [{}]), ids=str)
def test_a_job_goes_on_with_the_trials_of_one_that_ended_before_them(duo, tmp_path, options: dict[str, Any]) -> None:
    for first, second in duo.run(tuning_jobs.interrupted, folder=str(tmp_path), **options):
        (trial,) = first["trials"]
        assert first["kept"] == first["plan"] == trial["plan"]
        assert first["unfinished"]
        assert first["tuning"] == "stopped before the end of trials"
        assert second["first"] == first["plan"]
        assert "the fastest so far in the trials of an earlier job, which ended before them" in second["reason"]
        assert len(second["candidates"]) > 2
        assert len({*second["plans"]}) == len(second["plans"])
        assert second["trials"]
        assert second["tuning"].startswith("ended")
        assert not second["unfinished"]
        assert second["kept"] == second["plan"]


def test_a_plan_for_slow_links_is_not_taken_once_links_have_recovered(duo, tmp_path) -> None:
    for first, second in duo.run(tuning_jobs.recovered_links, folder=str(tmp_path)):
        assert "predicted from the measured" in first["reason"]
        assert "an earlier job" not in second["reason"]
        assert "link speeds measured by this job (in 0.1 s)" in second["links"]
        assert second["cluster"] == "pair"


def test_ranks_that_decide_differently_are_an_error_before_the_next_step(duo) -> None:
    for error in duo.run(tuning_jobs.divided):
        assert "ranks chose different plans for the same step (rank 0: " in error
        assert "; rank 1: " in error


def test_tuning_on_some_ranks_only_is_an_error_before_training(duo) -> None:
    for error in duo.run(tuning_jobs.other_settings):
        assert "tuning" in error


@pytest.mark.parametrize("options", [{}, {"overlap": "step"}], ids=str)
def test_links_that_change_are_planned_for_again(duo, options: dict[str, Any]) -> None:
    """So they are where trials found that steps are faster if they wait, although they could overlap."""
    for found in duo.run(tuning_jobs.changing_links, **options):
        assert found["distance"] < 1e-5
        assert found["windows"] > 3
        assert "measured" in found["report"]["links"]
        assert found["report"]["checks"][0].startswith("links were measured again in ")
        assert "predicted from the measured" in found["report"]["reason"]


@pytest.mark.parametrize(
    ("passes", "reason"),
    [(4, "a step takes 0.2 s, and 0.1 s before or in its trials"), (8, "steps wait 100% longer than before")],
)
def test_links_that_become_slow_during_trials_are_measured_once(passes: int, reason: str, duo) -> None:
    for checks in duo.run(tuning_jobs.slowing_trials, passes=passes):
        assert len(checks) == 1
        assert f"because {reason}. They have not changed." in checks[0]


def test_a_faster_plan_is_not_taken_for_faster_links(duo) -> None:
    for found in duo.run(tuning_jobs.faster_by_a_trial):
        assert found["accepted"] == [True, False]
        assert list(found["checks"]) == []


def test_links_that_change_in_a_trial_are_planned_for_again(duo) -> None:
    for found in duo.run(tuning_jobs.slowed_in_trials):
        ((passes, trying, reason),) = found["seen"]
        assert trying
        assert reason.startswith("steps wait ")
        assert 40 < passes <= 40 + 20
        assert found["links"] == "2 hosts, measured"
        assert found["distance"] < 1e-5


@pytest.mark.parametrize("ended", [False, True], ids=["while tuning", "after it"])
def test_tuning_adds_no_collective_call_to_the_steps_of_a_native_plan(duo, ended: bool) -> None:
    one, other = duo.run(tuning_jobs.calls_of_steps, ended=ended)
    for found in (one, other):
        assert found["calls"] == {"all_reduce": found["passes"] * found["messages"]}
        assert found["passes"] >= 60
        assert found["ended"] == ended
    assert one["times"] == other["times"]  # which ranks have agreed on
    assert len(one["times"]) >= (10 if ended else 60)


@pytest.mark.parametrize("options", [{}, {"overlap": "step"}], ids=str)
def test_validation_checkpoints_and_logging_do_not_count_in_trials(duo, tmp_path, options: dict[str, Any]) -> None:
    for found in duo.run(tuning_jobs.pauses, folder=str(tmp_path), **options):
        assert found["pauses"] >= 30
        assert found["speedups"] == [1.0]
        assert set(found["seconds"]) == {1.0}


def test_ranks_wait_for_a_search_that_takes_longer_than_their_timeout(duo) -> None:
    one, other = duo.run(tuning_jobs.slow_search)
    assert one == other
    assert one["fault"] == ""
    assert one["plans"]


def test_garbage_of_planning_is_collected_before_the_first_step(duo) -> None:
    assert duo.run(tuning_jobs.collections) == [1, 1]


def test_a_described_rate_that_is_far_from_the_link_is_told_on_the_first_rank(duo) -> None:
    told, silent = duo.run(tuning_jobs.far_rates)
    assert len(told) == 2
    assert all("described as 1 Mbit/s, measured " in line for line in told)
    assert silent == []
