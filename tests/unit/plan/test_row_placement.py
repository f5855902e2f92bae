"""Whether rows are gathered once or summed by servers, by prediction."""

from __future__ import annotations

import pytest
from clusters import uneven_cluster

from lightning_autosync.cluster import ClusterSpec, resolve_cluster
from lightning_autosync.errors import PlanError
from lightning_autosync.plan import RowBroadcast, SyncPlan, Tree, builders, compile_plan
from lightning_autosync.plan.builders.rows import place_rows, serve_rows
from lightning_autosync.plan.space import PlanSpace
from lightning_autosync.replay import Constants, Replay
from lightning_autosync.workload import Variable, Workload, catalogue

NCF = catalogue.build("ncf", batch_size=1024)
UNEVEN = uneven_cluster(4)


def table(touched: float | None) -> Workload:
    rows = Variable(name="table", shape=(10_000, 16), kind="row_sparse", rows=touched)
    return Workload(name="table", variables=(rows, Variable(name="head", shape=(16, 16))))


def topology_of(plan: SyncPlan, name: str = "table") -> str:
    return next(group.topology for group in plan.groups if name in group.variables)


@pytest.mark.parametrize("builder", ["byteps", "packed_trees", "all_reduce"])
@pytest.mark.parametrize(("touched", "expected"), [(50.0, True), (9_000.0, False), (None, False)])
def test_few_rows_are_gathered_and_common_rows_are_summed(builder: str, touched: float | None, expected: bool) -> None:
    """Of four ranks that each touch 90% of the rows, three others' rows are more than twice the union."""
    work = table(touched)
    plan = place_rows(builders.build(builder, work, UNEVEN), work, UNEVEN)
    assert (topology_of(plan) == "gather_rows") == expected
    assert topology_of(plan, "head") != "gather_rows"


def test_a_table_without_rows_has_a_place() -> None:
    empty = Variable(name="empty", shape=(0, 8), kind="sparse", rows=0.0)
    work = Workload(name="empty", variables=(empty, Variable(name="head", shape=(16, 16))))
    plan = place_rows(builders.packed_trees(work, UNEVEN), work, UNEVEN)
    assert Replay(work, UNEVEN).predict(compile_plan(plan, work, UNEVEN)).step_time > 0


@pytest.mark.parametrize("cluster", [UNEVEN, resolve_cluster("two_racks_8to1"), resolve_cluster("two_nodes_of_four")])
@pytest.mark.parametrize("touched", [50.0, 1_000.0, 9_000.0])
def test_the_replay_agrees(cluster: ClusterSpec, touched: float) -> None:
    work = table(touched)
    served = serve_rows(builders.byteps(work, cluster), work)
    chosen = place_rows(served, work, cluster)
    other = served if chosen != served else builders.gathered_rows(work, cluster)
    replay = Replay(work, cluster, Constants.ideal())
    seconds = [replay.predict(compile_plan(plan, work, cluster)).step_time for plan in (chosen, other)]
    assert seconds[0] <= 1.1 * seconds[1]


def test_on_fast_links_the_adding_of_all_rows_decides() -> None:
    """The links alone take a little less time if rows travel once, but each rank then adds up the rows of all ranks."""
    cluster = ClusterSpec.uniform(8, bandwidth=5e9)
    rows = Variable(name="table", shape=(1_000_000, 64), kind="row_sparse", rows=10_000)
    work = Workload(name="table", variables=(rows,))
    served = serve_rows(builders.byteps(work, cluster), work)
    assert place_rows(served, work, cluster) == served
    replay = Replay(work, cluster, Constants())
    gathered = builders.gathered_rows(work, cluster)
    times = [replay.predict(compile_plan(plan, work, cluster)).step_time for plan in (served, gathered)]
    assert times[0] < times[1]


def test_where_rates_are_unknown_rows_are_served() -> None:
    cluster = ClusterSpec.uniform(4)
    work = table(50.0)
    assert topology_of(place_rows(builders.all_reduce(work, cluster), work, cluster)) == "star"


def test_rows_stay_in_the_ranks_own_order_and_cover_the_table() -> None:
    schedule = compile_plan(builders.gathered_rows(NCF, UNEVEN), NCF, UNEVEN)
    gathered = [message for message in schedule.messages if message.rows]
    assert gathered
    for message in gathered:
        assert message.on_trees
        for transfer in message.rounds[0].transfers:
            assert isinstance(transfer, RowBroadcast)
            assert [tree.root for tree in transfer.trees] == [0, 1, 2, 3]


def test_dense_gradients_and_compression_are_refused() -> None:
    work = table(50.0)
    plan = builders.all_reduce(work, UNEVEN, topology="gather_rows")
    with pytest.raises(PlanError, match="'gather_rows' takes rows only, but 'head' has dense gradients"):
        compile_plan(plan, work, UNEVEN)
    group = builders.gathered_rows(work, UNEVEN).groups[0].model_dump() | {"compressor": {"kind": "fp16"}}
    with pytest.raises(PlanError, match="'gather_rows' does not support compression"):
        SyncPlan.from_dict({"format": SyncPlan.FORMAT, "world_size": 4, "groups": [group]})


def test_the_space_offers_it_for_rows_alone() -> None:
    space = PlanSpace(table(50.0), UNEVEN)
    methods = {name: domain for name, domain in space.parameters.items() if name.endswith("/method")}
    assert ["gather_rows" in domain for domain in methods.values()] == [name.startswith("table") for name in methods]


def test_a_tree_starts_at_the_rank_whose_rows_it_carries() -> None:
    with pytest.raises(ValueError, match="the tree of rank 0's rows starts at rank 1"):
        RowBroadcast(0, 4, (Tree((1, -1)), Tree((-1, 0))), 1)


def test_the_replay_charges_each_set_of_gathered_rows_that_arrives() -> None:
    """Eight ranks on one core unpack 7 sets each; each packs its own and adds up 8."""
    cluster = ClusterSpec.uniform(8, bandwidth=5e9)
    work = Workload(name="table", variables=(Variable(name="table", shape=(1000, 4), kind="row_sparse", rows=10),))
    constants = Constants.ideal().model_copy(update={"merge_cost": 1e-3, "cores": 1.0})
    plan = builders.gathered_rows(work, cluster)
    step_time = Replay(work, cluster, constants).predict(compile_plan(plan, work, cluster)).step_time
    assert step_time >= 8 * (7 + 1 + 8) * 1e-3
