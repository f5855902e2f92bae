"""The selection of plans by prediction: what it always contains, when it ends, and what jobs may not use."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from statistics import mean
from typing import Any
from unittest.mock import Mock

import numpy
import pytest
from clusters import shared_nodes, uneven_cluster
from sweeps import crossed

from lightning_autosync.cluster import ClusterSpec, resolve_cluster
from lightning_autosync.errors import DocumentError, PlanError
from lightning_autosync.plan import SyncPlan, builders, compile_plan, signature
from lightning_autosync.plan.builders.default import SEARCHED
from lightning_autosync.plan.builders.rows import serve_rows
from lightning_autosync.replay import Constants, Replay, synchronization_bound
from lightning_autosync.search import population, selection
from lightning_autosync.search.features import PlanFeatures, squared_distance
from lightning_autosync.search.selection import PredictedPlan, rank_plans
from lightning_autosync.workload import Variable, Workload

LAYERS = Workload(
    name="layers",
    variables=tuple(Variable(name=f"v{n:02}", shape=(60, 70)) for n in range(12)),
    forward_time=0.004,
    backward_time=0.008,
)
TABLE = LAYERS.model_copy(
    update={"variables": (Variable(name="table", shape=(5000, 4), kind="row_sparse"), *LAYERS.variables)}
)
STAR = uneven_cluster(4)


def ticks() -> Callable[[], float]:
    """A clock that goes on by a second whenever it is read."""
    seconds = count()
    return lambda: float(next(seconds))


def ranked(workload: Workload = LAYERS, cluster: ClusterSpec = STAR, **options: Any) -> list[PredictedPlan]:
    return rank_plans(workload, cluster, **{"seconds": 200.0, "clock": ticks(), **options})


def seconds(plan: SyncPlan, workload: Workload = LAYERS, cluster: ClusterSpec = STAR) -> float:
    return Replay(workload, cluster).predict(compile_plan(plan, workload, cluster)).step_time


@pytest.fixture(scope="module")
def found() -> list[PredictedPlan]:
    return ranked()


def test_the_fastest_plan_comes_first_at_the_replays_price(found: list[PredictedPlan]) -> None:
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    assert [one.seconds for one in found] == pytest.approx([seconds(one.plan) for one in found], rel=1e-12)
    assert {one.plan.semantics for one in found} == {"exact"}
    assert 3 <= len(found) <= 8


def test_it_contains_native_and_a_builder_that_no_other_beats(found: list[PredictedPlan]) -> None:
    assert signature(builders.all_reduce(LAYERS, STAR)) in {signature(one.plan) for one in found}
    prices = []
    for name in builders.names():
        try:
            prices.append(seconds(builders.build(name, LAYERS, STAR)))
        except DocumentError:
            continue
    best = min(one.seconds for one in found if one.origin in builders.names())
    assert best <= min(prices) * (1 + 1e-9)
    assert found[0].seconds <= best


def test_plans_differ(found: list[PredictedPlan]) -> None:
    features_of = PlanFeatures(LAYERS)
    searched = numpy.array([features_of(one.plan) for one in found if one.origin == SEARCHED])
    distances = squared_distance(searched, searched)
    assert (distances[~numpy.eye(len(searched), dtype=bool)] > 0.05).all()


def test_a_slow_link_gets_something_faster_than_native(found: list[PredictedPlan]) -> None:
    assert found[0].seconds < 0.8 * seconds(builders.all_reduce(LAYERS, STAR))


def test_plans_that_were_known_before_take_part_under_their_names(found: list[PredictedPlan]) -> None:
    slow = builders.build("ps", LAYERS, STAR)
    slow = slow.model_copy(update={"groups": slow.groups[::-1]})
    assert signature(slow) not in {signature(one.plan) for one in found}
    others = {"of other ranks": builders.build("ps", LAYERS, uneven_cluster(3)), "bf16": lossy(slow)}
    known = [("slow", slow), *others.items()]
    by_name = {one.origin: one for one in ranked(known=known)}
    assert by_name["slow"].plan == slow
    assert by_name["slow"].seconds == pytest.approx(seconds(slow), rel=1e-12)
    assert not others.keys() & by_name.keys()


def lossy(plan: SyncPlan) -> SyncPlan:
    data = plan.to_dict()
    data["groups"][0]["compressor"] = "bf16"
    return SyncPlan.from_dict(data)


def test_equal_arguments_give_equal_plans(found: list[PredictedPlan]) -> None:
    assert ranked() == found


def test_without_time_there_are_the_default_plans_alone() -> None:
    found = ranked(seconds=0.0)
    assert [one.origin for one in found] == ["byteps", "all_reduce"]  # both native plans are the same here


def test_the_time_ends_it_too_where_no_frames_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(population, "FRAMES_LIMIT", 0)
    monkeypatch.setattr(selection, "_LEAST_GENERATIONS", 10**6)
    assert len(ranked(seconds=60.0)) >= 3


def test_it_looks_at_the_clock_before_each_price() -> None:
    """A clock on which a price takes long ends the search after the last price that fits."""
    assert [readings(LAYERS, seconds=limit) for limit in (3.0, 6.0)] == [3, 6]


def readings(workload: Workload, **options: Any) -> int:
    """How often a search reads the clock, which goes on by a second each time."""
    clock = Mock(side_effect=ticks())
    ranked(workload, clock=clock, **options)
    return clock.call_count


@pytest.mark.parametrize("cluster", [ClusterSpec.uniform(1), ClusterSpec.uniform(3)])
def test_where_nothing_is_to_be_chosen_or_known_it_is_ddps_plan(cluster: ClusterSpec) -> None:
    (only,) = ranked(cluster=cluster)
    assert only.plan == builders.all_reduce(LAYERS, cluster)
    assert math.isnan(only.seconds) == (cluster.world_size > 1)


def test_a_step_may_take_no_time() -> None:
    instant = LAYERS.model_copy(update={"forward_time": 0.0, "backward_time": 0.0})
    (only,) = ranked(instant, ClusterSpec.uniform(1), constants=Constants.ideal())
    assert only.seconds == pytest.approx(0.0, abs=1e-9)


UNKNOWN = LAYERS.model_copy(update={"forward_time": 0.0, "backward_time": 0.0})


def test_an_unknown_computation_is_taken_to_last_as_long_as_the_links_need() -> None:
    found = ranked(UNKNOWN)
    best = found[0].seconds
    computing = UNKNOWN.model_copy(update={"forward_time": best / 3, "backward_time": 2 * best / 3})
    assert [one.balanced for one in found] == pytest.approx([seconds(one.plan, computing) for one in found])
    overlapping = ranked(UNKNOWN, overlaps=True)
    wire = synchronization_bound(UNKNOWN, STAR, Constants().framing, Constants().burst)
    assumed = UNKNOWN.model_copy(update={"forward_time": wire / 3, "backward_time": 2 * wire / 3})
    assert overlapping == ranked(assumed, overlaps=True)
    assert all(one.balanced == one.seconds for one in overlapping)


def test_a_known_computation_is_not_assumed(found: list[PredictedPlan]) -> None:
    assert all(one.balanced == one.seconds for one in found)


def test_plans_for_which_there_was_no_time_have_no_second_prediction() -> None:
    assert [(one.balanced, one.busy) for one in ranked(UNKNOWN, seconds=0.0)] == [(None, 0.0)] * 2


@pytest.mark.parametrize("cores", [None, 2.0])
def test_beside_an_assumed_computation_the_use_of_the_cores_is_predicted(cores: float | None) -> None:
    found = ranked(UNKNOWN, constants=Constants(cores=cores))
    best = found[0].seconds
    computing = UNKNOWN.model_copy(update={"forward_time": best / 3, "backward_time": 2 * best / 3})
    replay = Replay(computing, STAR, Constants(cores=cores))
    for one in found:
        predicted = replay.predict(compile_plan(one.plan, computing, STAR))
        assert one.busy == pytest.approx(mean(predicted.hosts) if cores is None else predicted.cores)
        assert one.busy > 0


def test_native_plans_come_first_in_the_second_prediction() -> None:
    found = ranked(UNKNOWN, seconds=0.0)
    time_for_one = selection._Budget(ticks(), 2.5)
    priced = selection._beside_computation(found, UNKNOWN, STAR, Constants(), False, time_for_one)
    assert [(one.origin, one.balanced is None) for one in priced] == [("byteps", True), ("all_reduce", False)]


def test_a_search_without_a_second_prediction_has_all_the_time() -> None:
    assert {one.balanced for one in ranked(UNKNOWN, balances=False)} == {None}
    assert readings(UNKNOWN, balances=False, seconds=6.0) == 6


def test_excluded_topologies_take_no_part(found: list[PredictedPlan]) -> None:
    assert "star" in topologies(found)
    assert "star" not in topologies(ranked(exclude=["star"]))


def test_ranks_of_one_node_are_ranked_as_well() -> None:
    found = ranked(cluster=resolve_cluster("one_node"))
    assert len(found) >= 3
    assert all(math.isfinite(one.seconds) for one in found)


def topologies(found: list[PredictedPlan]) -> set[str]:
    return {group.topology for one in found for group in one.plan.groups}


def test_native_cannot_be_excluded() -> None:
    with pytest.raises(PlanError, match="'native' cannot be excluded"):
        ranked(exclude=["native"])


@pytest.mark.parametrize(
    ("cluster", "workload"),
    [*crossed([STAR, shared_nodes(4)], [LAYERS, TABLE]), pytest.param(shared_nodes(5), LAYERS, marks=pytest.mark.slow)],
)
def test_native_only_is_collectives_alone(workload: Workload, cluster: ClusterSpec) -> None:
    for one in ranked(workload, cluster, native_only=True):
        schedule = compile_plan(one.plan, workload, cluster, two_level_collectives=True)
        assert all(message.collective for message in schedule.messages if not message.rows)


@pytest.mark.slow
def test_rows_never_take_the_backends_exchange() -> None:
    for options in ({}, {"native_only": True}):
        for one in ranked(TABLE, STAR, **options):
            rows = [group for group in one.plan.groups if "table" in group.variables]
            assert [group.topology == "native" for group in rows] == [False]
    native = serve_rows(builders.all_reduce(TABLE, STAR), TABLE)
    assert signature(native) in {signature(one.plan) for one in ranked(TABLE)}


def test_compression_only_if_allowed(found: list[PredictedPlan]) -> None:
    compressed = ranked(compression=True)[0]
    assert compressed.plan.semantics == "compressed"
    assert compressed.seconds < found[0].seconds


@pytest.mark.parametrize("builder", builders.relaxed_names())
def test_relaxed_plans_are_not_among_those_that_jobs_may_use(builder: str) -> None:
    space = selection._SelectionSpace(LAYERS, STAR, "exact", (), native_only=False, bucket_bytes=None)
    with pytest.raises(PlanError, match=f"builder '{builder}': its plan is relaxed; allowed: exact"):
        space.built(builder)


def test_buckets_of_several_sizes_are_proposed_unless_the_user_states_one() -> None:
    large = Workload(name="large", variables=tuple(Variable(name=f"w{n}", shape=(500, 1000)) for n in range(8)))
    origins = {one.origin for one in ranked(large, seconds=0.0)}
    assert {"all_reduce", "all_reduce (5 MiB)", "all_reduce (100 MiB)"} <= origins  # 1 MiB: as sized for the links
    stated = {one.origin for one in ranked(large, seconds=0.0, bucket_bytes=2**20)}
    assert not [name for name in stated if name.startswith("all_reduce (")]


def test_messages_have_the_size_that_the_user_states() -> None:
    size = 4 * 60 * 70 * 4  # four variables
    for one in ranked(bucket_bytes=size):
        if one.origin == SEARCHED:
            assert max(len(group.variables) for group in one.plan.groups) <= 4


def test_it_knows_the_hosts() -> None:
    slow = Constants(frame_cost=0.01)
    assert ranked(constants=slow)[0].seconds > ranked(constants=Constants(frame_cost=0.0))[0].seconds


@pytest.mark.slow
def test_it_needs_none_of_the_tools_of_live_searches() -> None:
    script = (
        "import sys, lightning_autosync.search.selection\n"
        "found = {'optuna', 'dgl', 'sklearn'} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
