"""The engine's own behaviour: unused parameters, accumulation, memory of compressors, disagreement."""

from __future__ import annotations

import pytest

from lightning_autosync.plan import TOPOLOGIES

COMPRESSORS = ["none", "bf16", "int8", "topk", "powersgd"]
TOLERANCES = {"none": 1e-6, "bf16": 0.01, "int8": 0.02, "powersgd": 1e-3}


@pytest.mark.parametrize("compressor", COMPRESSORS)
@pytest.mark.parametrize("topology", ["native", "star"])
def test_parameters_unused_somewhere_get_the_mean_and_unused_everywhere_none(pool, topology, compressor) -> None:
    # A backward pass needs something to differentiate, so the middle rank uses what the others do not.
    uses = [(True, False), (False, True), (True, False)]
    answers = pool.run("engine_calls:gradients", topology=topology, uses=uses, compressor=compressor)[:3]
    assert answers[0] == answers[1] == answers[2]
    if compressor != "topk":  # which keeps one of these few elements
        # The inputs of rank r are r + 1.
        assert answers[0]["left.weight"] == pytest.approx([4 / 3] * 6, rel=TOLERANCES[compressor])
        assert answers[0]["left.bias"] == pytest.approx([2 / 3] * 2, rel=TOLERANCES[compressor])
        assert answers[0]["right.weight"] == pytest.approx([2 / 3] * 6, rel=TOLERANCES[compressor])
        assert answers[0]["right.bias"] == pytest.approx([1 / 3] * 2, rel=TOLERANCES[compressor])
    uses = [(True, False)] * 3
    for found in pool.run("engine_calls:gradients", topology=topology, uses=uses, compressor=compressor)[:3]:
        assert found["right.weight"] is None
        assert found["right.bias"] is None
        assert found["left.bias"] is not None


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_accumulated_gradients_are_averaged_once(pool, topology: str) -> None:
    for gaps in pool.run("engine_calls:accumulated", topology=topology):
        assert max(gaps) < 1e-12


@pytest.mark.parametrize("topology", ["native", "tree"])
@pytest.mark.parametrize("compressor", ["bf16", "int8", "topk", "powersgd"])
def test_compressor_memory_survives_a_restart(pool, compressor: str, topology: str) -> None:
    assert pool.run("engine_calls:restored", compressor=compressor, topology=topology) == [0.0] * pool.world_size


def test_ranks_with_different_plans_are_refused_on_every_rank(pool) -> None:
    for error in pool.run("engine_calls:mismatched", what="plan"):
        assert error.startswith("PlanError: schedule: rank 1 compiled another one than rank 0")


def test_schedule_for_another_world_is_refused_on_every_rank(pool) -> None:
    for error in pool.run("engine_calls:mismatched", what="world"):
        assert "the process group has 3" in error


@pytest.mark.parametrize("compressor", ["none", "int8"])
@pytest.mark.parametrize("topology", ["native", "star"])
def test_a_frozen_parameter_disturbs_nothing(pool, topology: str, compressor: str) -> None:
    for history in pool.run("engine_calls:frozen_in_turn", topology=topology, compressor=compressor):
        live, frozen = zip(*history, strict=True)
        assert live == pytest.approx([1.0] * 8, rel=0.02)
        # Its gradient was accumulated twice, and then left alone.
        assert frozen[2:] == pytest.approx([frozen[1]] * 6)


def test_ranks_may_end_without_waiting_for_each_other(pool) -> None:
    assert pool.run("engine_calls:ended_without_a_barrier", builder="byteps", trials=8) == [[]] * pool.world_size


def test_a_rank_that_ends_early_is_named(pool) -> None:
    errors = pool.run("engine_calls:fewer_steps", victim=2)
    assert errors.pop(2) == ""
    assert all(error for error in errors)
    assert any("rank 2 has ended after step 2; this is step 3" in error for error in errors)


def test_a_world_of_one(pool) -> None:
    assert pool.run("engine_calls:alone")[0] == [1.0, 1.0]


def test_a_rank_that_cannot_listen_stops_all(pool) -> None:
    for error in pool.run("engine_calls:deaf"):
        assert error.startswith("rank 1 cannot listen for its peers: 192.0.2.1: ")


def test_no_backward_pass_follows_one_that_broke_off(pool) -> None:
    for error in pool.run("engine_calls:after_an_error"):
        assert "ended with an error on this rank (MemoryError: out of memory)" in error


def test_gradients_with_a_graph_of_their_own(pool) -> None:
    assert pool.run("engine_calls:second_derivatives") == pytest.approx([6.0] * pool.world_size)
