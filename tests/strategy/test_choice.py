"""What is taken without a plan."""

from __future__ import annotations

import warnings

import pytest
from torch import nn

from lightning_autosync.cluster import ClusterSpec, resolve_cluster, ring_time, synchronization_time
from lightning_autosync.plan import builders
from lightning_autosync.plan.builders.default import shards_time
from lightning_autosync.strategy.choice import choose_plan, plans_by_formula
from lightning_autosync.strategy.resolution import resolve
from lightning_autosync.strategy.settings import StrategySettings
from lightning_autosync.workload import Variable, Workload, describe, large_tables

NET = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
WORKLOAD = describe(NET)


def topologies(cluster: ClusterSpec, known: bool = True) -> set[tuple[str, str]]:
    plan, reason = choose_plan(WORKLOAD, cluster, known)
    assert plan.semantics == "exact"
    assert reason
    return {(group.architecture, group.topology) for group in plan.groups}


def test_native_messages_are_as_large_as_links_are_fast() -> None:
    workload = Workload(name="ten", variables=tuple(Variable(name=f"v{i}", shape=(2**20,)) for i in range(20)))

    def messages(bandwidth: float) -> int:
        cluster = ClusterSpec.uniform(nodes=4, bandwidth=bandwidth)
        plan, reason = choose_plan(workload, cluster, known=True)
        assert "fused native all-reduce" in reason
        return len(plan.groups)

    # Each of 4 MiB by itself; two by two, after the first; DDP's own.
    assert [messages(rate) for rate in (25e6, 200e6, 10e9)] == [20, 11, 4]


def test_equal_links_keep_the_native_all_reduce() -> None:
    assert topologies(resolve_cluster("four_equal")) == {("all_reduce", "native")}


def test_one_fat_node_takes_proportional_shards() -> None:
    cluster = ClusterSpec.star([1e9, 2e8, 2e8, 2e8])
    assert topologies(cluster) == {("parameter_server", "star")}
    assert shards_time(cluster, 1e6) == pytest.approx(synchronization_time(cluster, 1e6))


def test_formulas_price_the_native_all_reduce_and_what_suits_the_links() -> None:
    cluster = ClusterSpec.star([1e9, 2e8, 2e8, 2e8])
    native, linked = plans_by_formula(WORKLOAD, cluster)
    assert (native.builder, linked.builder) == ("all_reduce", "byteps")
    assert native.seconds == ring_time(cluster, WORKLOAD.bytes)
    assert linked.seconds == pytest.approx(synchronization_time(cluster, WORKLOAD.bytes))
    table = Variable(name="table", shape=(1_000_000, 64), kind="row_sparse", rows=100)
    with_table = WORKLOAD.model_copy(update={"variables": (*WORKLOAD.variables, table)})
    assert [each.seconds for each in plans_by_formula(with_table, cluster)] == pytest.approx(
        [native.seconds, linked.seconds]
    )
    only_table = WORKLOAD.model_copy(update={"variables": (table,)})
    assert all(each.seconds > 0 for each in plans_by_formula(only_table, cluster))


def test_racks_behind_thin_uplinks_take_trees() -> None:
    racks = resolve_cluster("two_racks_8to1")
    names = [node.name for node in racks.nodes]
    shuffled = racks.with_rank_order([*names[::2], *names[1::2]])
    assert topologies(shuffled) == {("all_reduce", "packed")}


@pytest.mark.parametrize(
    ("cluster", "known", "words"),
    [
        (ClusterSpec.star([1e9, 2e8, 2e8]), False, "no cluster is described"),
        (ClusterSpec.uniform(3), True, "unknown"),
        (ClusterSpec.uniform(1), True, "one rank"),
    ],
)
def test_what_cannot_be_predicted_is_not_guessed(cluster: ClusterSpec, known: bool, words: str) -> None:
    plan, reason = choose_plan(WORKLOAD, cluster, known)
    assert plan == builders.all_reduce(WORKLOAD, cluster)
    assert words in reason


def test_ranks_of_one_machine_sum_in_shared_memory_in_few_large_messages() -> None:
    large = Workload(
        name="large",
        variables=tuple(Variable(name=f"v{n}", shape=(1024, 2048), dtype="float32") for n in range(20)),
    )
    cluster = ClusterSpec.uniform(1, devices=4)
    plan, reason = choose_plan(large, cluster, False, shares_cores=True)
    assert [group.topology for group in plan.groups] == ["shared_memory"] * 2  # 160 MiB
    assert "shared memory" in reason
    plan, reason = choose_plan(large, cluster, False, shares_cores=True, sharing_fault="rank 1 is elsewhere")
    assert [group.topology for group in plan.groups] == ["native"] * 2
    assert "run on one machine but cannot share memory: rank 1 is elsewhere" in reason
    assert len(choose_plan(large, cluster, False, 25 * 2**20, shares_cores=True)[0].groups) == 5
    assert len(choose_plan(large, cluster, False, shares_cores=False)[0].groups) > 2
    assert len(choose_plan(large, ClusterSpec.uniform(2), False, shares_cores=True)[0].groups) > 2


@pytest.mark.parametrize(
    ("ranks", "rate", "cores", "large"),
    [
        (2, "8 Gbit/s", 2, True),
        (4, "8 Gbit/s", 2, True),
        (2, "4 Gbit/s", 2, False),
        (4, "1 Gbit/s", 2, False),
        (4, "8 Gbit/s", None, False),
    ],
)
def test_messages_are_large_where_shared_cores_and_not_links_are_the_limit(
    ranks: int, rate: str, cores: int | None, large: bool
) -> None:
    workload = Workload(name="ten", variables=tuple(Variable(name=f"v{i}", shape=(2**20,)) for i in range(20)))
    cluster = ClusterSpec.uniform(nodes=ranks, bandwidth=rate)
    plan, reason = choose_plan(workload, cluster, known=True, cores=cores)
    assert {group.topology for group in plan.groups} == {"native"}
    assert (len(plan.groups) == 1) == large
    assert ("all ranks share the cores of one machine" in reason) == large
    stated, reason = choose_plan(workload, cluster, known=True, cores=cores, bucket_bytes=2**20)
    assert len(stated.groups) == 20
    assert "cores" not in reason


@pytest.mark.parametrize(
    ("rates", "cores", "native"),
    [
        (("10 Gbit/s", "8 Gbit/s", "8 Gbit/s", "8 Gbit/s"), 2, True),
        (("10 Gbit/s", "8 Gbit/s", "8 Gbit/s", "8 Gbit/s"), None, False),
        (("32 Gbit/s", "8 Gbit/s", "8 Gbit/s", "8 Gbit/s"), 2, False),
    ],
)
def test_where_shared_cores_are_the_limit_another_method_has_to_gain_more(
    rates: tuple[str, ...], cores: int | None, native: bool
) -> None:
    plan, reason = choose_plan(WORKLOAD, ClusterSpec.star(rates), known=True, cores=cores)
    assert ({group.topology for group in plan.groups} == {"native"}) == native
    assert ("no other method is more than 25% faster" in reason) == native


def test_predicted_times_leave_out_tables_whose_rows_are_sent() -> None:
    star = ClusterSpec.star([1e9, 2e8, 2e8, 2e8])
    table = Variable(name="table", shape=(1_000_000, 64), kind="row_sparse", rows=100)
    _, reason = choose_plan(WORKLOAD, star, known=True)
    _, with_table = choose_plan(WORKLOAD.model_copy(update={"variables": (*WORKLOAD.variables, table)}), star, True)
    assert with_table == f"{reason}; touched rows of embeddings are sent in addition"


def test_bucket_size_is_passed_on() -> None:
    plan, _ = choose_plan(WORKLOAD, ClusterSpec.uniform(2), False, bucket_bytes=1024)
    assert len(plan.groups) > 1


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Embedding(5000, 2)
        self.bag = nn.EmbeddingBag(4096, 2)
        self.small = nn.Embedding(4095, 2)
        self.sparse = nn.Embedding(5000, 2, sparse=True)
        self.tied = nn.Embedding(5000, 2)
        self.head = nn.Linear(2, 5000, bias=False)
        self.head.weight = self.tied.weight
        self.frozen = nn.Embedding(5000, 2).requires_grad_(False)


def test_large_dense_tables_of_their_own_travel_by_rows() -> None:
    module = Tables()
    assert large_tables(module) == {"large.weight", "bag.weight"}
    variables = resolve(StrategySettings(), module, 1, 2).workload.variables
    assert {variable.name: variable.kind for variable in variables} == {
        "large.weight": "row_sparse",
        "bag.weight": "row_sparse",
        "small.weight": "dense",
        "sparse.weight": "sparse",
        "tied.weight": "dense",
    }


def test_a_given_plan_decides_which_tables_travel_by_rows() -> None:
    module = Tables()
    fused = ("bag.weight", "small.weight")
    plan = builders.partitioned_all_reduce(describe(module), ClusterSpec.uniform(2))
    alone = [group for group in plan.groups if group.name not in fused]
    together = plan.groups[0].model_copy(update={"name": "both", "variables": fused, "partition": None})
    given = plan.model_copy(update={"groups": (*alone, together)})
    found = resolve(StrategySettings(plan=given), module, 2, 1).workload
    assert {v.name for v in found.variables if v.kind == "row_sparse"} == {"large.weight"}


@pytest.mark.parametrize(
    ("nodes", "devices", "described", "warned"), [(4, 1, False, True), (4, 1, True, False), (2, 2, False, False)]
)
def test_a_plan_for_racks_without_a_cluster_is_warned_of(
    nodes: int, devices: int, described: bool, warned: bool
) -> None:
    module = nn.Linear(4, 4)
    racks = ClusterSpec.racks(racks=2, nodes_per_rack=2, bandwidth="1 Gbit/s", uplink="1 Gbit/s")
    plan = builders.hierarchical(describe(module), racks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resolve(StrategySettings(plan=plan, cluster=racks if described else None), module, nodes, devices)
    assert any("no cluster tells which nodes share a rack" in str(each.message) for each in caught) == warned


def test_on_accelerators_only_the_backend_is_chosen() -> None:
    star = ClusterSpec.star(bandwidths=["400 Mbit/s", "100 Mbit/s", "100 Mbit/s", "100 Mbit/s"])
    assert choose_plan(WORKLOAD, star, known=True)[0].groups[0].topology != "native"
    plan, reason = choose_plan(WORKLOAD, star, known=True, accelerated=True)
    assert {group.topology for group in plan.groups} == {"native"}
    assert "measured only if asked for" in reason
