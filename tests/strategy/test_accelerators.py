"""Jobs on accelerators measure plans before their first step, and train by the fastest."""

from __future__ import annotations

import accelerator_jobs
import pytest
from torch import nn

from lightning_autosync import ClusterSpec
from lightning_autosync.plan import builders
from lightning_autosync.strategy.tuning.accelerators import _candidates, _chosen
from lightning_autosync.strategy.tuning.live import Alternative
from lightning_autosync.strategy.tuning.proposals import Proposals
from lightning_autosync.workload import describe

WORKLOAD = describe(nn.Linear(8, 8))
EIGHT = ClusterSpec.uniform(2, 4, "1 Gbit/s")
FOUR = ClusterSpec.uniform(4, 1, "1 Gbit/s")


def plan(name: str, seconds: float, native: bool = False) -> Alternative:
    return Alternative(builders.build("all_reduce", WORKLOAD, FOUR), name, seconds, native)


@pytest.mark.parametrize(("fastest", "topology"), [("all_reduce", "native"), ("search", None)])
def test_trains_by_the_plan_that_is_fastest_when_measured(duo, fastest: str, topology: str | None) -> None:
    for found in duo.run(accelerator_jobs.compare, fastest=fastest):
        assert found["distance"] < 1e-5
        assert found["moved"] > 1e-3
        assert found["logged"][0].count("measured in") == 1
        assert found["logged"][1] == "no other plan is tried: on accelerators plans are measured before the first step"
        assert (found["topologies"] == ["native"]) == (topology == "native")


def test_passes_of_zeros_leave_the_model_alone_and_skip_plans_that_cannot_be_opened(duo) -> None:
    for found in duo.run(accelerator_jobs.measure):
        first, unopened, last = found["seconds"]
        assert first > 0
        assert unopened is None
        assert last > 0
        assert found["same"]
        assert found["clear"]
        assert found["opened"] == 4  # two plans, there and back


def test_measures_nothing_without_memory_on_any_rank(duo) -> None:
    assert (
        duo.run(accelerator_jobs.without_memory)
        == ["some device has too little free memory for 4 copies of all gradients"] * 2
    )


def test_the_fastest_plan_must_gain_five_percent() -> None:
    native = plan("all_reduce", 1.0, native=True)
    near, far = plan("packed_trees", 0.96), plan("search", 0.5)
    assert _chosen([native, near], native, "measured").plans == [native]
    assert "the best is packed_trees" in _chosen([native, near], native, "measured").reason
    found = _chosen([native, near, far], native, "measured")
    assert found.plans == [far, native]
    assert found.reason == (
        "a plan that the search found, measured: gradients take 500.0 ms, and 1.000 s with DDP's plan"
    )
    assert "no other plan could be opened" in _chosen([native], native, "measured").reason


def test_two_levels_of_the_backend_are_measured_where_nodes_have_several_devices() -> None:
    predicted = {"all_reduce": 1.0, "ps": 3.0, "search": 0.5}
    ranked = Proposals([plan(name, seconds) for name, seconds in predicted.items()], "")
    names = [each.name for each in _candidates(ranked, WORKLOAD, EIGHT, two_level_collectives=True)]
    assert names == ["hierarchical", "search", "ps"]
    assert [each.name for each in _candidates(ranked, WORKLOAD, FOUR, True)] == ["search", "ps"]
    assert [each.name for each in _candidates(ranked, WORKLOAD, EIGHT, False)] == ["search", "ps"]
