"""The engine's own behaviour: unused parameters, accumulation, memory of compressors, disagreement."""

from __future__ import annotations

from uuid import uuid4

import engine_calls
import pytest
from sweeps import SHARE, crossed, sweep

from lightning_autosync.plan import topologies

COMPRESSORS = ["none", "bf16", "int8", "topk", "powersgd"]
IN_PAIRS = ["recursive_doubling", "halving_doubling"]
TOLERANCES = {"none": 1e-6, "bf16": 0.01, "int8": 0.02, "powersgd": 1e-3}


@pytest.mark.parametrize(
    ("topology", "compressor"),
    [*crossed(["native", "star"], COMPRESSORS), *((topology, "none") for topology in ["shared_memory", *IN_PAIRS])],
)
def test_parameters_unused_somewhere_get_the_mean_and_unused_everywhere_none(pool, topology, compressor) -> None:
    # A backward pass needs something to differentiate, so the middle rank uses what the others do not.
    uses = [(True, False), (False, True), (True, False)]
    answers = pool.run(engine_calls.gradients, topology=topology, uses=uses, compressor=compressor)[:3]
    assert answers[0] == answers[1] == answers[2]
    if compressor != "topk":  # which keeps one of these few elements
        # The inputs of rank r are r + 1.
        assert answers[0]["left.weight"] == pytest.approx([4 / 3] * 6, rel=TOLERANCES[compressor])
        assert answers[0]["left.bias"] == pytest.approx([2 / 3] * 2, rel=TOLERANCES[compressor])
        assert answers[0]["right.weight"] == pytest.approx([2 / 3] * 6, rel=TOLERANCES[compressor])
        assert answers[0]["right.bias"] == pytest.approx([1 / 3] * 2, rel=TOLERANCES[compressor])
    uses = [(True, False)] * 3
    for found in pool.run(engine_calls.gradients, topology=topology, uses=uses, compressor=compressor)[:3]:
        assert found["right.weight"] is None
        assert found["right.bias"] is None
        assert found["left.bias"] is not None


@pytest.mark.parametrize(("topology", "noticed"), crossed(["native", "tree"], [[0], [1], [0, 2], [0, 1, 2]]))
@pytest.mark.parametrize("as_views", [False, True])
def test_ranks_may_notice_a_change_in_different_passes(pool, topology: str, noticed: list[int], as_views: bool) -> None:
    options = {"noticed": noticed, "gradient_as_bucket_view": as_views}
    uses = [(True, False), (False, True), (True, False)]
    for found in pool.run(engine_calls.gradients, topology=topology, uses=uses, **options)[:3]:
        assert found["left.bias"] == pytest.approx([2 / 3] * 2)
        assert found["right.bias"] == pytest.approx([1 / 3] * 2)
    for found in pool.run(engine_calls.gradients, topology=topology, uses=[(True, False)] * 3, **options)[:3]:
        assert found["left.bias"] == pytest.approx([1.0] * 2)
        assert found["right.bias"] is None


@pytest.mark.parametrize("topology", [name for name in topologies.names() if not topologies.find(name).rows_only])
def test_accumulated_gradients_are_averaged_once(pool, topology: str) -> None:
    for gaps in pool.run(engine_calls.accumulated, topology=topology):
        assert max(gaps) < 1e-12


TREES = ["star", "tree", "ring", "double_tree"]


@pytest.mark.parametrize(("topology", "segment"), [("native", None), *crossed([*TREES, *IN_PAIRS], [None, 1024])])
def test_notes_of_all_ranks_travel_with_gradients_and_change_none(pool, topology: str, segment: int | None) -> None:
    for found, gap in pool.run(engine_calls.with_notes, topology=topology, segment=segment):
        assert found == [[[step + rank, -rank] for rank in range(pool.world_size)] for step in range(3)]
        assert gap < 1e-12


@pytest.mark.parametrize(("topology", "compressor"), crossed(TREES, ["none", "bf16", "int8", "topk"]))
def test_roots_know_the_norms_of_sums(pool, topology: str, compressor: str) -> None:
    found = pool.run(engine_calls.norms_of_roots, topology=topology, compressor=compressor)
    for messages, gap, refused in found:
        assert messages
        assert gap < 1e-6
        assert refused


@pytest.mark.parametrize("topology", ["native", "star", "tree", "ring", "halving_doubling"])
def test_a_message_has_come_when_all_ranks_have_sent(pool, topology: str) -> None:
    found = pool.run(engine_calls.arrivals, topology=topology, key=f"arrivals {topology} {uuid4()}")
    assert all(before and not any(before) for before, _ in found[:-1])
    assert all(after and all(after) for _, after in found)


@pytest.mark.parametrize(("topology", "compressor"), crossed(["native", "tree"], COMPRESSORS[1:]))
def test_compressor_memory_survives_a_restart(pool, compressor: str, topology: str) -> None:
    assert pool.run(engine_calls.restored, compressor=compressor, topology=topology) == [0.0] * pool.world_size


@pytest.mark.parametrize(("topology", "compressor"), crossed(["native", "tree"], COMPRESSORS[1:]))
def test_compressor_memory_follows_the_loss_scale_and_forgets_skipped_steps(pool, compressor, topology) -> None:
    # A QR may round a scaled matrix in another way.
    tolerance = 1e-6 if compressor == "powersgd" else 0.0
    for found in pool.run(engine_calls.under_a_scaler, compressor=compressor, topology=topology):
        assert found["distance"] <= tolerance
        assert found["memory"] <= tolerance
        assert found["lost"] > 1e-6


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf")])
def test_a_loss_scale_that_is_none(pool, scale: float) -> None:
    for error in pool.run(engine_calls.refused_scale, scale=scale):
        assert "loss_scale" in error


@pytest.mark.parametrize("compressor", sweep(["int8", "topk", "powersgd"], ["int8", "powersgd"]))
def test_compressor_memory_goes_over_to_another_plan_by_variable(pool, compressor: str) -> None:
    for found in pool.run(engine_calls.carried_over, compressor=compressor):
        assert found["shapes"]["hidden.weight"] == [13, 108]
        assert found["lost"] > 0
        assert found["difference"] == 0.0
        assert found["left_out"] == []
        assert found["dropped"] == found["names"]


def test_ranks_with_different_plans_are_refused_on_every_rank(pool) -> None:
    for error in pool.run(engine_calls.mismatched, what="plan"):
        assert error.startswith("PlanError: schedule: rank 1 has a different schedule from rank 0")


def test_schedule_for_another_world_is_refused_on_every_rank(pool) -> None:
    for error in pool.run(engine_calls.mismatched, what="world"):
        assert "the process group has 3" in error


@pytest.mark.parametrize(
    ("topology", "compressor"), [*crossed(["native", "star"], ["none", "int8"]), ("shared_memory", "none")]
)
def test_a_frozen_parameter_disturbs_nothing(pool, topology: str, compressor: str) -> None:
    for history in pool.run(engine_calls.frozen_in_turn, topology=topology, compressor=compressor):
        live, frozen = zip(*history, strict=True)
        assert live == pytest.approx([1.0] * 8, rel=0.02)
        # Its gradient was accumulated twice, and then left alone.
        assert frozen[2:] == pytest.approx([frozen[1]] * 6)


@pytest.mark.parametrize(
    ("builder", "topology"),
    [("byteps", "star"), *(("all_reduce", topology) for topology in ["shared_memory", *IN_PAIRS])],
)
def test_ranks_may_end_without_waiting_for_each_other(pool, builder: str, topology: str) -> None:
    trials = max(2, round(8 * SHARE))
    errors = pool.run(engine_calls.ended_without_a_barrier, builder=builder, topology=topology, trials=trials)
    assert errors == [[]] * pool.world_size


@pytest.mark.parametrize("topology", ["ring", "shared_memory", *IN_PAIRS])
def test_a_rank_that_ends_early_is_named(pool, topology: str) -> None:
    errors = pool.run(engine_calls.fewer_steps, topology=topology, victim=2)
    assert errors.pop(2) == ""
    assert all(error for error in errors)
    # Who hears of it first names it; the others may only see that one leave.
    assert any("rank 2" in error for error in errors), errors


def test_a_world_of_one(pool) -> None:
    assert pool.run(engine_calls.alone)[0] == [1.0, 1.0]


def test_a_rank_that_cannot_listen_stops_all(pool) -> None:
    for error in pool.run(engine_calls.deaf):
        assert error.startswith("rank 1 cannot listen for its peers: 192.0.2.1: ")


def test_a_rank_without_memory_stops_all_who_can_then_open_another_engine(pool) -> None:
    for error, gradient in pool.run(engine_calls.without_memory):
        assert error == "OpeningError: rank 1: no memory"
        assert gradient == 1.0


def test_no_backward_pass_follows_one_that_broke_off(pool) -> None:
    for error in pool.run(engine_calls.after_an_error):
        assert "failed on this rank (MemoryError: out of memory)" in error


def test_gradients_with_a_graph_of_their_own(pool) -> None:
    assert pool.run(engine_calls.second_derivatives) == pytest.approx([6.0] * pool.world_size)
