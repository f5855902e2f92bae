"""Jobs on accelerators measure plans before their first step, and train by the fastest."""

from __future__ import annotations

import math
from dataclasses import replace

import accelerator_jobs
import pytest
from torch import nn

from lightning_autosync import ClusterSpec
from lightning_autosync.plan import builders
from lightning_autosync.plan.builders.default import SEARCHED
from lightning_autosync.strategy.tuning.accelerators import Measured, _candidates, _chosen
from lightning_autosync.strategy.tuning.live import Alternative
from lightning_autosync.strategy.tuning.proposals import Proposals
from lightning_autosync.workload import describe

WORKLOAD = describe(nn.Linear(8, 8))
EIGHT = ClusterSpec.uniform(2, 4, "1 Gbit/s")
FOUR = ClusterSpec.uniform(4, 1, "1 Gbit/s")


def plan(name: str, seconds: float, native: bool = False) -> Alternative:
    return Alternative(builders.build("all_reduce", WORKLOAD, FOUR), name, seconds, native)


ENDED = "no other plan is tried: on accelerators plans are measured before the first step"


@pytest.mark.parametrize("other_wins", [False, True])
def test_trains_by_the_plan_that_is_fastest_when_measured(duo, other_wins: bool) -> None:
    for found in duo.run(accelerator_jobs.compare, other_wins=other_wins):
        assert found["distance"] < 1e-5
        assert found["moved"] > 1e-3
        topology, reason, ended = found["told"]
        assert "measured in" in reason
        assert ended == ENDED
        assert (topology != "native") == other_wins


def test_a_layer_that_trains_later_is_not_measured_for(duo) -> None:
    for found in duo.run(accelerator_jobs.compare, other_wins=True, model="Thaws", reference="ThawsLate"):
        assert found["distance"] < 1e-5
        first, _, _, later, _, ended = found["told"]
        assert first != "native"
        assert later == "native"
        assert (
            ended
            == "no other plan is tried: the model is on 'cuda', where plans are measured before the first step only"
        )


def test_measures_nothing_unless_asked(duo) -> None:
    for topology, _, ended in duo.run(accelerator_jobs.unasked):
        assert topology == "native"
        assert "tuning={'accelerators': True} measures plans there" in ended


def test_passes_of_zeros_skip_plans_that_cannot_be_opened_and_leave_no_buffers(duo) -> None:
    for found in duo.run(accelerator_jobs.measure):
        first, unopened, last = found["seconds"]
        assert 0 < first < math.inf
        assert unopened == math.inf
        assert 0 < last < math.inf
        assert found["paced"][0] > accelerator_jobs.PACE
        assert found["zeros"]
        assert set(found["alive"]) == {0}
        assert len(found["alive"]) >= 4


def test_measures_nothing_if_a_rank_has_no_memory(duo) -> None:
    for topology, reason, _ in duo.run(accelerator_jobs.without_memory):
        assert topology == "native"
        assert reason == "fused native all-reduce, because no plans can be measured: no memory"


def test_messages_have_the_size_that_the_user_gave(duo) -> None:
    for counts in duo.run(accelerator_jobs.with_sizes):
        assert min(counts) > 1


def test_large_embeddings_train_as_without_tuning(duo) -> None:
    for measured, off in duo.run(accelerator_jobs.embedding_plans):
        assert measured == off


DDP, NEAR, FAR = plan("all_reduce", 0.0, native=True), plan("packed_trees", 0.0), plan(SEARCHED, 0.0)


@pytest.mark.parametrize(
    ("near", "far", "expected"),
    [
        ((0.96, math.inf), (math.inf, math.inf), [DDP]),
        ((0.90, 1.70), (0.5, 1.6), [FAR, DDP]),
        ((0.90, 1.50), (0.5, 1.6), [NEAR, DDP]),  # the faster one beside a backward pass
        ((0.90, 1.99), (0.5, 2.2), [DDP]),
    ],
)
def test_the_fastest_plan_must_gain_five_percent_with_and_without_a_backward_pass(
    near: tuple[float, float], far: tuple[float, float], expected: list[Alternative]
) -> None:
    found = _chosen([Measured(DDP, 1.0, 2.0), Measured(NEAR, *near), Measured(FAR, *far)], "measured")
    assert [each.plan for each in found.plans] == [each.plan for each in expected]
    assert [each.name for each in found.plans] == [each.name for each in expected]


def test_reasons_of_measured_plans() -> None:
    assert _chosen([Measured(DDP, 1.0, 2.0), Measured(FAR, 0.5, 1.6)], "measured").reason == (
        "a plan found by search, measured: gradients take 500.0 ms, and 1.000 s with the native all-reduce; with "
        "a backward pass as long as that, 1.600 s and 2.000 s"
    )
    assert _chosen([Measured(DDP, 1.0), Measured(NEAR, 0.96)], "measured").reason == (
        "fused native all-reduce, because no other plan is more than 5% faster. The best is packed_trees, "
        "measured: gradients take 960.0 ms, and 1.000 s with the native all-reduce"
    )
    assert "no other plan could be opened" in _chosen([Measured(DDP, 1.0), Measured(NEAR, math.inf)], "measured").reason


def test_two_levels_of_the_backend_are_measured_where_nodes_have_several_devices() -> None:
    predicted = {"all_reduce": 1.0, "ps": 3.0, "search": 0.5}
    ranked = Proposals([plan(name, seconds) for name, seconds in predicted.items()], "")
    names = [each.name for each in _candidates(ranked, WORKLOAD, EIGHT, two_level_collectives=True)]
    assert names == ["hierarchical", "search", "ps"]
    assert [each.name for each in _candidates(ranked, WORKLOAD, FOUR, True)] == ["search", "ps"]
    assert [each.name for each in _candidates(ranked, WORKLOAD, EIGHT, False)] == ["search", "ps"]


def test_a_plan_that_was_not_predicted_has_no_predicted_time() -> None:
    other = Alternative(builders.build("ps", WORKLOAD, EIGHT), "ps", 3.0)
    (unknown, _) = _candidates(Proposals([other], ""), WORKLOAD, EIGHT, two_level_collectives=True)
    assert math.isnan(unknown.predicted)
    same = replace(unknown, predicted=2.0)
    found = _candidates(Proposals([other, same], ""), WORKLOAD, EIGHT, two_level_collectives=True)
    assert [(each.name, each.predicted) for each in found] == [("hierarchical", 2.0), ("ps", 3.0)]


def test_with_overlap_no_plans_are_measured_whose_steps_wait() -> None:
    ranked = Proposals([plan("all_reduce", 1.0), plan("search", 0.5).waiting(), plan("ps", 3.0)], "")
    assert [each.name for each in _candidates(ranked, WORKLOAD, FOUR, False)] == ["ps"]
