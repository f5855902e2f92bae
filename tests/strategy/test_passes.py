"""Which backward passes are synchronized; what follows one that failed, and layers that come while a model trains."""

from __future__ import annotations

from typing import Any

import pass_jobs
import pytest
from sweeps import crossed


@pytest.mark.parametrize("plan", ["all_reduce", "packed_trees"])
def test_a_rank_whose_loss_reaches_no_parameter_takes_part(duo, plan: str) -> None:
    assert duo.run(pass_jobs.unreached, plan=plan) == [[1.0, 5.0, 100.0]] * 2


def test_a_forward_pass_after_a_failed_backward_pass_raises_as_under_ddp(duo) -> None:
    for theirs in duo.run(pass_jobs.caught, ddp=True):
        assert theirs.startswith("RuntimeError: Expected to have finished reduction")
    for ours in duo.run(pass_jobs.caught, ddp=False):
        assert ours.startswith("ExchangeError: an earlier backward pass failed on this rank")


@pytest.mark.parametrize(
    ("layer", "kept", "strategy"),
    crossed(
        [(0, False), (2, False), (2, True)],
        [{"plan": "all_reduce"}, {"plan": "packed_trees"}, {"plan": "all_reduce", "gradient_as_bucket_view": True}],
    ),
)
def test_no_gradient_is_lost_when_a_layer_trains_again(duo, layer: int, kept: bool, strategy: dict[str, Any]) -> None:
    assert max(duo.run(pass_jobs.thawed_late, layer=layer, kept=kept, **strategy)) < 1e-6


@pytest.mark.parametrize("strategy", [{}, {"plan": "all_reduce", "overlap": "step"}])
def test_new_layers_are_made_equal(duo, strategy: dict[str, str]) -> None:
    assert duo.run(pass_jobs.new_layers, **strategy) == [0.0, 0.0]


def test_a_parameter_that_a_users_plan_lacks_is_refused_in_each_pass(duo) -> None:
    expected = ["none", *["PlanError: plan: groups: parameter '1.weight' was unfrozen or added"] * 3]
    assert duo.run(pass_jobs.unplanned) == [expected] * 2


@pytest.mark.parametrize(("how", "overlap"), [("fabric", False), ("plain", False), ("late", False), ("fabric", True)])
def test_passes_raise_where_ranks_could_not_connect_after_a_change(duo, how: str, overlap: bool) -> None:
    for found in duo.run(pass_jobs.passes_after_a_failed_opening, how=how, overlap=overlap):
        assert [found[0], found[1], found[4]] == ["none", "OpeningError: rank 1: no memory", "none"]
        for error in found[2:4]:
            assert error.startswith("ExchangeError: gradients are no longer synchronized")
            assert "OpeningError: rank 1: no memory" in error


def test_passes_raise_where_new_parameters_could_not_be_made_equal(duo) -> None:
    for found in duo.run(
        pass_jobs.passes_after_a_failed_opening, how="plain", overlap=False, fails="broadcast_tensors"
    ):
        assert found[1] == "OpeningError: rank 1: no memory"
        assert all(error.startswith("ExchangeError: gradients are no longer synchronized") for error in found[2:4])


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "barrier", "broadcast"])
def test_collective_calls_of_fabric_notice_a_change_on_another_rank(duo, kind: str) -> None:
    expected = "PlanError: model: parameter 'head.bias': requires_grad is False on rank 1"
    assert all(found.startswith(expected) for found in duo.run(pass_jobs.change_before_a_collective, kind=kind))


def test_a_failed_setup_leaves_no_hook(duo) -> None:
    assert duo.run(pass_jobs.hooks_after_a_failed_setup) == [0, 0]


def test_closing_during_a_trial_ends_the_overlap(duo) -> None:
    assert duo.run(pass_jobs.overlap_after_a_trial_that_closing_ends) == [False, False]


def test_a_failed_setup_of_fabric_closes_the_failure_detector(duo) -> None:
    assert duo.run(pass_jobs.failure_detector_after_a_failed_setup) == [True, True]
