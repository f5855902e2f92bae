"""Replicas never differ silently: what changes on all ranks alike is followed, what changes on some is an error."""

from __future__ import annotations

import divergence_jobs
import pytest
from sweeps import crossed, sweep

PLANS = [{}, {"plan": "all_reduce"}, {"plan": "packed_trees"}]
A_MESSAGE_EACH = {"plan": "all_reduce", "bucket_cap_mb": 1e-6}
"""So that a parameter that is frozen is a whole message."""
WAYS = [*PLANS, A_MESSAGE_EACH, {"static_graph": True}]
FABRIC_WAYS = [*PLANS, {"plain_backward": True}, {"evaluating": True}]


@pytest.mark.parametrize(("change", "strategy"), crossed(["replace", "add_layer", "freeze", "assign"], WAYS))
def test_parameters_that_change_on_all_ranks_are_followed(duo, change: str, strategy: dict[str, str]) -> None:
    assert duo.run(divergence_jobs.change, name=change, where=[0, 1], **strategy) == [0.0, 0.0]


ON_ONE_RANK = [
    ("replace", "parameter 'head.weight' was replaced by another tensor on rank 1, but not on rank 0"),
    ("add_layer", "parameter 'body.weight' exists on rank 0, but not on rank 1"),
    ("freeze", "parameter 'head.bias': requires_grad is False on rank 1, and True on rank 0"),
    ("assign", "parameter 'body.weight' was replaced by another tensor on rank 1, but not on rank 0"),
]


@pytest.mark.parametrize(("change", "expected", "strategy"), crossed(ON_ONE_RANK, [*PLANS, A_MESSAGE_EACH]))
def test_parameters_that_change_on_one_rank_are_an_error_on_all(duo, change, expected, strategy) -> None:
    found = duo.run(divergence_jobs.change, name=change, where=[1], **strategy)
    assert found[0] == found[1]
    assert found[0].startswith("PlanError: model: " + expected)


@pytest.mark.parametrize("change", ["new_buffer", "longer_buffer"])
def test_buffers_that_change_on_all_ranks_are_followed_as_with_ddp(duo, change: str) -> None:
    ours, theirs = (duo.run(divergence_jobs.change_buffers, name=change, where=[0, 1], ddp=ddp) for ddp in (0, 1))
    assert ours == theirs
    assert ours[0] == ours[1]


BUFFERS = [
    ("new_buffer", "late", "torch.float64 of shape [3]", "missing"),
    ("longer_buffer", "mark", "torch.float32 of shape [7]", "torch.float32 of shape [5]"),
    ("no_buffer", "mark", "missing", "torch.float32 of shape [5]"),
]


@pytest.mark.parametrize(("change", "buffer", "changed", "before", "odd"), crossed(BUFFERS, [0, 1]))
def test_buffers_that_change_on_one_rank_are_an_error_on_all(duo, change, buffer, changed, before, odd) -> None:
    first, second = (changed, before) if odd == 0 else (before, changed)
    for error in duo.run(divergence_jobs.change_buffers, name=change, where=[odd]):
        assert f"model: buffer '{buffer}' is {second} on rank 1 and {first} on rank 0. " in error


@pytest.mark.parametrize(("change", "strategy"), crossed(["assign_in_place", "new_head", "freeze"], FABRIC_WAYS))
def test_parameters_that_change_on_all_ranks_are_followed_under_fabric(duo, change: str, strategy) -> None:
    assert duo.run(divergence_jobs.change_under_fabric, name=change, where=[0, 1], **strategy) == [0.0, 0.0]


UNDER_FABRIC = [
    ("assign_in_place", "PlanError: model: parameter 'body.weight' was replaced by another tensor on rank 1"),
    ("new_head", "PlanError: model: parameter 'head.weight' was replaced by another tensor on rank 1"),
    ("freeze", "PlanError: model: parameter 'head.bias': requires_grad is False on rank 1"),
    ("weight", "ExchangeError: replicas differ: the weights of 'head.bias' on rank 1 differ from those on rank 0"),
]


@pytest.mark.parametrize(("change", "expected", "strategy"), crossed(UNDER_FABRIC, FABRIC_WAYS))
def test_what_changes_on_one_rank_is_an_error_on_all_under_fabric(duo, change, expected, strategy) -> None:
    found = duo.run(divergence_jobs.change_under_fabric, name=change, where=[1], check_replicas=5, **strategy)
    assert found[0] == found[1]
    assert found[0].startswith(expected)


@pytest.mark.parametrize("change", ["learning_rate", "weight", "gradient"])
def test_weights_that_differ_are_an_error_on_all_ranks(duo, change: str) -> None:
    first, second = duo.run(divergence_jobs.change, name=change, where=[1], check_replicas=2)
    assert first == second
    assert first.startswith("ExchangeError: replicas differ: the weights of ")
    assert "'head.bias'" in first
    assert "on rank 1 differ from those on rank 0" in first
    assert "equal after 2 synchronized backward passes and differ after 4" in first or (
        "equal after 4 synchronized" in first
    )


def test_weights_are_compared_when_training_ends(duo) -> None:
    found = duo.run(divergence_jobs.change, name="weight", where=[1])
    assert all("replicas differ: the weights of 'head.bias'" in error for error in found)


@pytest.mark.parametrize(("change", "by_callback"), [("weight", False), ("weight", True), ("convert", False)])
def test_one_rank_may_change_its_model_when_training_has_ended(duo, change: str, by_callback: bool) -> None:
    """As for an export of averaged, merged or shorter weights; weights were compared before."""
    found = duo.run(divergence_jobs.change_at_end, name=change, where=[0], by_callback=by_callback)
    assert found == [16, 16]


@pytest.mark.parametrize(
    ("change", "seen"),
    [({"dtype": "float16"}, "torch.float16 of shape [6, 4]"), ({"rows": 5}, "torch.float32 of shape [5, 4]")],
)
def test_weights_of_another_dtype_or_shape_are_an_error_that_says_so(duo, change, seen: str) -> None:
    for error in duo.run(divergence_jobs.other_forms, **change):
        assert f"replicas differ: parameter 'body' is {seen} on rank 1 and torch.float32 of shape [6, 4]" in error


@pytest.mark.parametrize("strategy", sweep([{}, {"check_replicas": 2}], [{"check_replicas": 2}]))
def test_frozen_weights_are_compared(duo, strategy) -> None:
    assert duo.run(divergence_jobs.load_frozen, rank=None, **strategy) == [0.0, 0.0]
    for error in duo.run(divergence_jobs.load_frozen, rank=0, **strategy):
        assert (
            "replicas differ: the weights of 'body.weight', 'body.bias' on rank 1 differ from those on rank 0" in error
        )
        assert not strategy or "equal after 0 synchronized backward passes and differ after 2." in error


def test_the_comparison_of_weights_can_be_left_out(duo) -> None:
    first, second = duo.run(divergence_jobs.change, name="weight", where=[1], check_replicas=0)
    assert first == 0.0
    assert second > 0.1


@pytest.mark.parametrize("strategy", sweep(PLANS, [{}]))
def test_networks_that_are_frozen_in_turn_keep_their_engine(duo, strategy: dict[str, str]) -> None:
    for found in duo.run(divergence_jobs.in_turn, **strategy):
        assert found["distance"] < 1e-6
        assert found["plans"] <= 2


@pytest.mark.parametrize(
    "strategy", sweep([*PLANS, A_MESSAGE_EACH, {"gradient_as_bucket_view": True}], [PLANS[2], A_MESSAGE_EACH])
)
def test_networks_that_are_frozen_in_turn_exchange_each_message_once_under_fabric(duo, strategy) -> None:
    for found in duo.run(divergence_jobs.in_turn_under_fabric, **strategy):
        assert found["distance"] < 1e-6
        assert len(found["exchanges"]) == 12
        assert max(found["exchanges"][2:]) == 1, "once both structures were seen"
        assert found["gathers"] == 0


@pytest.mark.parametrize("strategy", sweep([*PLANS, A_MESSAGE_EACH], [{}, A_MESSAGE_EACH]))
def test_one_rank_that_freezes_more_than_others_in_turn_is_an_error_on_all(duo, strategy) -> None:
    for error in duo.run(divergence_jobs.odd_in_turn, **strategy):
        assert error.startswith(
            "PlanError: model: parameter 'head.bias': requires_grad is False on rank 1, and True on rank 0"
        )


@pytest.mark.parametrize("strategy", sweep(PLANS, PLANS[2:]))
def test_a_new_part_trains_while_others_are_frozen_in_turn(duo, strategy) -> None:
    assert duo.run(divergence_jobs.new_head_in_turn, **strategy) == [0.0, 0.0]


@pytest.mark.parametrize(("plan", "as_view"), crossed([None, "all_reduce", "packed_trees"], [False, True]))
def test_a_gradient_of_one_rank_is_the_mean_when_another_part_begins_to_train(duo, plan, as_view: bool) -> None:
    arguments = {"plan": plan, "gradient_as_bucket_view": as_view}
    assert duo.run(divergence_jobs.unused_when_changed, **arguments) == [[0.5, 0.5, 1.0]] * 2


def test_a_part_may_begin_to_train_as_another_is_frozen(duo) -> None:
    assert duo.run(divergence_jobs.one_for_another) == [[1.0, 1.0]] * 2


@pytest.mark.parametrize("strategy", sweep([*PLANS, {"gradient_as_bucket_view": True}], [{}]))
def test_parameters_that_get_another_dtype_are_synchronized(duo, strategy) -> None:
    assert duo.run(divergence_jobs.other_dtype, **strategy) == [[0.5] * 4] * 2


def test_an_error_while_gradients_are_accumulated_is_the_ranks_own(duo) -> None:
    assert duo.run(divergence_jobs.error_while_accumulating) == [1.0, 1.0]
