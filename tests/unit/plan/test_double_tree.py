"""Two binary trees, each with half of a message: what one passes on is a leaf for the other."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan import TreeTransfer, builders, compile_plan
from lightning_autosync.plan.topologies.double_tree import in_order
from lightning_autosync.replay import Replay
from lightning_autosync.workload import Variable, Workload


def transfers(ranks: int, builder: str = "all_reduce", **arguments) -> list[TreeTransfer]:
    workload = Workload(name="one", variables=(Variable(name="weight", shape=(1000,)),))
    cluster = ClusterSpec.uniform(ranks)
    plan = builders.build(builder, workload, cluster, topology="double_tree", **arguments)
    return list(compile_plan(plan, workload, cluster).messages[0].rounds[0].transfers)


@given(ranks=st.integers(2, 70))
def test_a_rank_inside_one_tree_is_a_leaf_of_the_other(ranks: int) -> None:
    one, two = transfers(ranks)
    assert abs((one.stop - one.start) - (two.stop - two.start)) <= 1
    inside = [{rank for rank, children in enumerate(each.reduce.children) if children} for each in (one, two)]
    # A root has one child; nothing else is inside both.
    assert inside[0] & inside[1] <= {one.root, two.root}
    assert all(each.reduce.depth <= math.log2(ranks) + 1 for each in (one, two))
    assert all(len(children) <= 2 for each in (one, two) for children in each.reduce.children)


@given(ranks=st.integers(2, 40), server=st.integers(0, 39))
def test_both_trees_end_at_a_server(ranks: int, server: int) -> None:
    for each in transfers(ranks, "ps", server=server % ranks):
        assert each.root == server % ranks
        assert len(each.reduce.children[each.root]) <= 1


def test_ranks_of_a_node_go_through_their_leader() -> None:
    workload = Workload(name="one", variables=(Variable(name="weight", shape=(1000,)),))
    cluster = ClusterSpec.uniform(4, devices=2)
    plan = builders.all_reduce(workload, cluster, topology="double_tree")
    group = plan.groups[0].model_copy(update={"local_aggregation": True})
    schedule = compile_plan(plan.model_copy(update={"groups": (group,)}), workload, cluster)
    for each in schedule.messages[0].rounds[0].transfers:
        leaders = {rank for rank, children in enumerate(each.reduce.children) if children} | {each.root}
        assert len(leaders & {0, 2, 4, 6}) == 4


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_few_ranks(count: int) -> None:
    for half in (0, 1):
        assert sorted(in_order(range(count), half)) == list(range(count))


def test_small_messages_among_many_ranks_are_sooner_there_than_by_any_other_all_reduce() -> None:
    """By the replay: 1 KiB among 16 ranks, 20 us a link."""
    workload = Workload(name="small", variables=(Variable(name="weight", shape=(256,), ready=0.0),))
    cluster = ClusterSpec.uniform(16, bandwidth="1 Gbit/s", latency="20 us")
    replay = Replay(workload, cluster)
    found = {}
    for topology in ("native", "ring", "tree", "star", "packed", "double_tree"):
        plan = builders.all_reduce(workload, cluster, topology=topology)
        found[topology] = replay.predict(compile_plan(plan, workload, cluster)).step_time
    assert min(found, key=lambda name: found[name]) == "double_tree"
    assert found["native"] > 4 * found["double_tree"]
