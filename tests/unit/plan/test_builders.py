"""Builders do what their sources say."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
from clusters import shared_nodes, uneven_cluster

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import PlanError
from lightning_autosync.plan import SyncPlan, builders, compile_plan
from lightning_autosync.plan.builders import registry
from lightning_autosync.plan.schedule import AllReduce, AllToAll, TreeTransfer
from lightning_autosync.plan.trees import Tree
from lightning_autosync.workload import Variable, Workload, catalogue


def workload(*sizes: int) -> Workload:
    return Workload(
        name="model",
        variables=tuple(Variable(name=f"v{index}", shape=(size,), dtype="float32") for index, size in enumerate(sizes)),
    )


def test_all_reduce_makes_ddp_buckets() -> None:
    plan = builders.all_reduce(workload(100, 10, 20, 30), uneven_cluster(2), bucket_bytes=150, first_bucket_bytes=80)
    # From the last variable on: 30 x 4 bytes reach 80; 20 and 10 stay below 150 until v0 joins.
    assert [group.variables for group in plan.groups] == [("v3",), ("v2", "v1", "v0")]


def test_chunks_count_variables() -> None:
    plan = builders.all_reduce(workload(1, 1, 1, 1, 1), uneven_cluster(2), chunk_size=2)
    assert [group.variables for group in plan.groups] == [("v4",), ("v2", "v3"), ("v0", "v1")]


def test_ps_load_balancing_fills_the_least_loaded() -> None:
    plan = builders.ps_load_balancing(workload(4, 3, 2, 9), uneven_cluster(2))
    # v3 (9) to rank 0; v2 (2), v1 (3), v0 (4) to rank 1, which never exceeds 9.
    assert {group.name: group.placement for group in plan.groups} == {
        "v3": (0,),
        "v2": (1,),
        "v1": (1,),
        "v0": (1,),
    }


@pytest.mark.parametrize(("length", "even", "uneven"), [(9, 3, 2), (8, 2, 3), (7, 7, 2), (2, 2, 1), (1, 1, 1)])
def test_partitioned_ps(length: int, even: int, uneven: int) -> None:
    cluster = uneven_cluster(2)
    assert builders.partitioned_ps(workload(length), cluster).groups[0].shards == even
    assert builders.uneven_partitioned_ps(workload(length), cluster).groups[0].shards == uneven


def test_random_axis_is_drawn_by_seed() -> None:
    vgg = catalogue.build("vgg16")
    plans = [builders.random_axis_partitioned_all_reduce(vgg, uneven_cluster(4), seed=seed) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]
    assert any(group.partition and group.partition.axis for group in plans[0].groups)


def test_parallax_serves_rows_and_reduces_the_rest() -> None:
    ncf = catalogue.build("ncf")
    plan = builders.parallax(ncf, uneven_cluster(4))
    kinds = {group.architecture: {ncf.variable(name).kind for name in group.variables} for group in plan.groups}
    assert kinds == {"parameter_server": {"row_sparse"}, "all_reduce": {"dense"}}


def test_byteps_gives_the_fat_node_more() -> None:
    plan = builders.byteps(workload(100_000), uneven_cluster(4))
    weights = plan.groups[0].partition.weights
    assert weights[0] > 0.9
    (message,) = compile_plan(plan, workload(100_000), uneven_cluster(4)).messages
    first = message.rounds[0].transfers[0]
    assert (first.root, first.start) == (0, 0)
    assert first.stop > 90_000


def test_ring_is_rotated_chains() -> None:
    plan = builders.all_reduce(workload(9), uneven_cluster(3), topology="ring")
    (message,) = compile_plan(plan, workload(9), uneven_cluster(3)).messages
    transfers = message.rounds[0].transfers
    assert [transfer.root for transfer in transfers] == [0, 1, 2]
    assert transfers[0].reduce == Tree((-1, 2, 0))
    assert transfers[0].broadcast == Tree((-1, 0, 1))


def test_hierarchical_crosses_between_nodes_once_a_node() -> None:
    cluster = shared_nodes(4)
    plan = builders.hierarchical(workload(1000), cluster)
    (message,) = compile_plan(plan, workload(1000), cluster).messages
    node_of = cluster.rank_nodes
    for transfer in message.rounds[0].transfers:
        crossings = [
            rank
            for rank, parent in enumerate(transfer.reduce.parents)
            if parent >= 0 and node_of[rank] != node_of[parent]
        ]
        assert len(crossings) == 1
    assert {transfer.root for transfer in message.rounds[0].transfers} == {0, 1, 2, 3}


def test_native_plans_use_collectives_only() -> None:
    for name, expected in (("all_reduce", AllReduce), ("ps", AllToAll)):
        plan = builders.build(name, workload(10, 10), uneven_cluster(4), topology="native")
        schedule = compile_plan(plan, workload(10, 10), uneven_cluster(4))
        for message in schedule.messages:
            assert message.collective
            assert all(isinstance(transfer, expected) for transfer in message.rounds[0].transfers)
        assert schedule.tree_edges() == set()


def test_packed_trees_carry_their_weights() -> None:
    cluster = uneven_cluster(4)
    plan = builders.packed_trees(workload(100_000), cluster)
    (message,) = compile_plan(plan, workload(100_000), cluster).messages
    for tree, transfer in zip(plan.groups[0].trees, message.rounds[0].transfers, strict=True):
        assert isinstance(transfer, TreeTransfer)
        assert (transfer.stop - transfer.start) / 100_000 == pytest.approx(tree.weight, abs=1e-4)


def test_rerooting_keeps_the_edges() -> None:
    tree = Tree((-1, 0, 1, 1, 0))
    for root in range(5):
        hung = tree.rerooted(root)
        assert hung.root == root
        edges = [
            {frozenset((rank, parent)) for rank, parent in enumerate(t.parents) if parent >= 0} for t in (tree, hung)
        ]
        assert edges[0] == edges[1]


@pytest.mark.parametrize(
    ("builder", "arguments", "message"),
    [
        ("all_reduce", {"bucket_bytes": -5}, "builder 'all_reduce': bucket_bytes: Input should be greater than 0"),
        ("all_reduce", {"bucket_bytes": "hello"}, "builder 'all_reduce': bucket_bytes: .*valid integer"),
        (
            "all_reduce",
            {"topology": "foo"},
            "builder 'all_reduce': topology: .*'foo' is not known; .*native",
        ),
        (
            "all_reduce",
            {"compressor": {"kind": "zip"}},
            r"'all_reduce': compressor\.kind: .*int8.*\(got 'zip'\)$",
        ),
        ("all_reduce", {"compressor": "zip"}, r"builder 'all_reduce': compressor\.kind: .*\(got 'zip'\)$"),
        (
            "all_reduce",
            {"compressor": "fp16", "topology": "shared_memory"},
            "topology: 'shared_memory' does not support compression",
        ),
        ("all_reduce", {"speed": 1}, "builder 'all_reduce' has no argument 'speed'; allowed: topology, bucket_bytes,"),
        ("all_reduce", {"cluster": 1}, "builder 'all_reduce' has no argument 'cluster'"),
        ("random_axis_partitioned_all_reduce", {"seed": "x"}, "seed: .*valid integer"),
        ("ps", {"server": 2}, r"^server: rank 2 is out of range; the cluster has 2 ranks$"),
        ("ps", {"server": True}, "builder 'ps': server: .*valid integer"),
        ("ps_load_balancing", {"servers": [0, 7]}, "^servers: rank 7 is out of range"),
        ("ps_load_balancing", {"servers": []}, "^servers: at least one rank"),
        ("partial_reduce", {"group_size": 1}, "builder 'partial_reduce': group_size: .*2"),
        ("partial_reduce", {"group_size": 3}, "^group_size: 3 is above the number of ranks, 2$"),
        ("periodic", {"period": 0}, "builder 'periodic': period: "),
        ("asynchronous", {"staleness": 1}, "'asynchronous' has no argument 'staleness'; allowed: none"),
    ],
)
def test_arguments_that_a_builder_does_not_take(builder: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        builders.build(builder, workload(4, 3), uneven_cluster(2), **arguments)
    assert "\n" not in str(caught.value)


def test_given_arguments_are_those_of_the_function() -> None:
    asked = (workload(100, 10, 20, 30), uneven_cluster(2))
    arguments = {"bucket_bytes": 150, "topology": "ring", "compressor": {"kind": "powersgd", "rank": 2}}
    assert builders.build("all_reduce", *asked, **arguments) == builders.all_reduce(*asked, **arguments)
    assert builders.build("all_reduce", *asked, compressor="fp16") == builders.all_reduce(*asked, compressor="fp16")
    whole = builders.build("all_reduce", *asked, bucket_bytes=1.5e2, first_bucket_bytes=numpy.int64(80))
    assert whole == builders.all_reduce(*asked, bucket_bytes=150, first_bucket_bytes=80)
    assert builders.build("ps_load_balancing", *asked, servers=numpy.array([1])).groups[0].placement == (1,)
    with pytest.raises(PlanError, match="message size: 0 bytes; must be 1 or more"):
        builders.all_reduce(*asked, bucket_bytes=0)


def _without_topology(workload: Workload, cluster: ClusterSpec) -> SyncPlan:
    raise NotImplementedError


def _without_cluster(workload: Workload, *, topology: str = "native") -> SyncPlan:
    raise NotImplementedError


def _untyped(workload: Workload, cluster: ClusterSpec, *, topology: str = "native", speed=1) -> SyncPlan:  # type: ignore[no-untyped-def]
    raise NotImplementedError


def _needy(workload: Workload, cluster: ClusterSpec, *, topology: str = "native", speed: int) -> SyncPlan:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("builder", "message"),
    [
        (_without_topology, "builder '_without_topology' of .*: it must take the keyword argument 'topology'"),
        (_without_cluster, "it takes 1 positional arguments, but must take 2: workload, cluster"),
        (_untyped, "argument 'speed' has no type"),
        (_needy, "its keyword argument 'speed' needs a default"),
        (builders.ps, "builder 'ps' of .*parameter_server already has this name"),
    ],
)
def test_what_is_no_builder_is_refused(builder: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        builders.register()(builder)


def test_a_package_elsewhere_adds_a_builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "foreign_rings.py").write_text(
        "from lightning_autosync.cluster import ClusterSpec\n"
        "from lightning_autosync.plan import SyncPlan, builders\n"
        "from lightning_autosync.workload import Workload\n\n\n"
        "@builders.register()\n"
        "def rings(workload: Workload, cluster: ClusterSpec, *, topology: str = 'ring') -> SyncPlan:\n"
        "    return builders.all_reduce(workload, cluster, topology=topology)\n"
    )
    about = tmp_path / "foreign_rings-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign-rings\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[lightning_autosync.builders]\nrings = foreign_rings\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    registry._load.cache_clear()
    try:
        assert builders.names()[-1] == "rings"
        assert builders.build("rings", workload(8), uneven_cluster(2)).groups[0].topology == "ring"
    finally:
        registry._load.cache_clear()
        sys.modules.pop("foreign_rings", None)
