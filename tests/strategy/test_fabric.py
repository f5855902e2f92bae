"""Fabric: two modules, accumulation, checkpoints."""

from __future__ import annotations

from typing import Any

import jobs
import pytest
from sweeps import crossed


@pytest.mark.parametrize(
    "arguments",
    [{}, {"plain_backward": True}, {"precision": "bf16-mixed"}],
    ids=["fabric.backward", "loss.backward", "bf16-mixed"],
)
def test_equals_ddp(duo, arguments: dict[str, object]) -> None:
    assert max(duo.run(jobs.fabric_against_ddp, **arguments)) < 1e-6


def test_step_methods_compute_in_the_precision_asked_for(duo) -> None:
    assert duo.run(jobs.fabric_redirects)[0] == ["torch.bfloat16", "torch.bfloat16"]


def test_the_engine_knows_the_scale_of_the_loss(duo) -> None:
    for found in duo.run(jobs.fabric_scales):
        assert found["told"] == found["used"]
        assert found["used"][-1] > found["used"][0]


def test_each_module_has_the_figures_of_its_steps(duo) -> None:
    for found in duo.run(jobs.fabric_figures):
        assert found["measured"] == [True, True]
        assert found["before"] == found["after"] == [None, None]
        figures, none = found["found"]
        assert none is None
        assert 0 <= figures["wait"] < figures["step_time"] < 60
        assert figures["plan_changes"] == figures["tuning"] == 0.0


def test_a_module_may_be_set_up_again(duo) -> None:
    assert duo.run(jobs.fabric_twice) == [[1.5], [1.5]]


@pytest.mark.parametrize("options", [{}, {"plan": "all_reduce"}, {"plan": "packed_trees", "overlap": "step"}])
def test_modules_that_the_user_deletes_are_gone(duo, options: dict[str, str]) -> None:
    assert duo.run(jobs.modules_after_the_user_deletes_them, **options) == [[], []]


def test_modules_that_the_user_deletes_leave_no_process_group(duo) -> None:
    assert duo.run(jobs.groups_of_modules) == [[2, 1, 0]] * 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [("never", [0.00390625, 0.00390625]), ("once", [-0.3125, 0.25]), ("in turn", [-1.71875, 1.64453125])],
)
def test_a_rank_may_run_a_module_more_often_than_others(duo, changes: str, expected: list[float]) -> None:
    assert duo.run(jobs.fabric_looks, changes=changes) == [expected, expected]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"plan": "all_reduce"},
        {"plan": "packed_trees"},
        {"plan": "all_reduce", "overlap": "step", "check_replicas": 2},
        {"overlap": "step", "check_replicas": 2},
    ],
    ids=str,
)
def test_one_backward_pass_reaches_modules_in_any_order(duo, options: dict[str, Any]) -> None:
    expected = [0.00390625] * 4
    assert duo.run(jobs.modules_in_any_order, **options) == [expected, expected]


def test_layers_of_modules_in_any_order_are_frozen_in_turn(duo) -> None:
    expected = [-1.71875, 1.64453125] * 2
    assert duo.run(jobs.modules_in_any_order, changes="in turn") == [expected, expected]


@pytest.mark.parametrize(("fabric", "static_graph"), crossed([True, False], [False, True]))
def test_blocks_in_reentrant_checkpoints_share_one_exchange(duo, fabric: bool, static_graph: bool) -> None:
    for found in duo.run(jobs.adapters, fabric=fabric, static_graph=static_graph):
        assert found["passes"] == 8
        assert found["distance"] < 1e-6


def test_resumed_training_equals_uninterrupted(duo, tmp_path) -> None:
    for found in duo.run(jobs.fabric_resume, folder=str(tmp_path)):
        assert found == {"distance": 0.0, "step": 2, "remainder": []}
