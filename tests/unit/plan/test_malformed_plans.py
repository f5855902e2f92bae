"""Every malformed plan gives one clear error that names file and field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import PlanError
from lightning_autosync.plan import Group, Schedule, SyncPlan, builders, compile_plan
from lightning_autosync.plan.schedule import AllReduce, Round, TreeTransfer
from lightning_autosync.plan.trees import Tree
from lightning_autosync.workload import Variable, Workload


def plan_with(**group: Any) -> dict[str, Any]:
    return {
        "format": "autosync-plan/1",
        "world_size": 4,
        "groups": [{"name": "all", "variables": ["weight"], **group}],
    }


SERVED = {"architecture": "parameter_server", "topology": "star"}

MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "no format": ({"world_size": 2, "groups": []}, "format: missing; expected 'autosync-plan/1'"),
    "future format": (plan_with() | {"format": "autosync-plan/2"}, "written by a newer release"),
    "foreign format": (plan_with() | {"format": "autosync-cluster/1"}, "format: 'autosync-cluster/1'"),
    "unknown field": (plan_with() | {"bucket": 3}, "bucket: unknown field"),
    "unknown field in a group": (plan_with(topologie="ring"), "groups[0].topologie: unknown field"),
    "no groups": (plan_with() | {"groups": []}, "groups: "),
    "no world size": (
        {"format": "autosync-plan/1", "groups": plan_with()["groups"]},
        "world_size: missing",
    ),
    "world size true": (plan_with() | {"world_size": True}, "world_size: Input should be a valid integer (got True)"),
    "shards true": (plan_with(partition={"shards": True}), "groups[0].partition.shards: "),
    "placement true": (plan_with(**SERVED, placement=[True]), "groups[0].placement[0]: "),
    "world size 0": (plan_with() | {"world_size": 0}, "world_size: "),
    "relaxed plan that waits": (
        plan_with() | {"waits": True, "consistency": {"mode": "asynchronous"}},
        "waits: allowed only in synchronous plans without `served`; leave it out",
    ),
    "group without variables": (plan_with(variables=[]), "groups[0].variables: "),
    "unknown topology": (plan_with(topology="torus"), "groups[0].topology: "),
    "unknown architecture": (plan_with(architecture="gossip"), "groups[0].architecture: "),
    "unknown compressor": (plan_with(compressor="zip"), "groups[0].compressor.kind: "),
    "ratio above one": (plan_with(compressor={"kind": "topk", "ratio": 2}), "groups[0].compressor.ratio: "),
    "zero shards": (plan_with(partition={"shards": 0}), "groups[0].partition.shards: "),
    "negative axis": (plan_with(partition={"axis": -1, "shards": 2}), "groups[0].partition.axis: "),
    "too few weights": (
        plan_with(partition={"shards": 3, "weights": [1, 2]}),
        "weights: expected one for each of 3 shards, got 2",
    ),
    "weights of nothing": (
        plan_with(partition={"shards": 2, "weights": [0, 0]}),
        "at least one must be above zero",
    ),
    "placement of all-reduce": (plan_with(placement=[0]), "placement: allowed with architecture"),
    "placement too short": (
        plan_with(**SERVED, partition={"shards": 2}, placement=[1]),
        "placement: expected one rank for each of 2 shards, got 1",
    ),
    "rank out of range": (
        plan_with(**SERVED, placement=[4]),
        "groups[0].placement[0]: rank 4 is out of range",
    ),
    "negative rank": (plan_with(**SERVED, placement=[-1]), "groups[0].placement[0]: "),
    "axis of a fused group": (
        plan_with(variables=["weight", "bias"], partition={"axis": 1, "shards": 2}),
        "partition.axis: not allowed with several variables",
    ),
    "cyclic tree": (
        plan_with(topology="packed", trees=[{"weight": 1, "parents": [-1, 2, 1, 0]}]),
        "groups[0].trees[0].parents: the tree has a cycle",
    ),
    "two roots": (
        plan_with(topology="packed", trees=[{"weight": 1, "parents": [-1, -1, 0, 0]}]),
        "a tree has one root",
    ),
    "parent out of range": (
        plan_with(topology="packed", trees=[{"weight": 1, "parents": [-1, 0, 0, 9]}]),
        "parent 9 of rank 3 is out of range",
    ),
    "tree for another world": (
        plan_with(topology="packed", trees=[{"weight": 1, "parents": [-1, 0]}]),
        "groups[0].trees[0].parents: expected one for each of 4 ranks, got 2",
    ),
    "cyclic broadcast tree": (
        plan_with(topology="packed", trees=[{"weight": 1, "parents": [-1, 0, 0, 0], "broadcast": [-1, 2, 1, 0]}]),
        "groups[0].trees[0].broadcast: the tree has a cycle",
    ),
    "broadcast tree with another root": (
        plan_with(topology="packed", trees=[{"weight": 1, "parents": [-1, 0, 0, 0], "broadcast": [1, -1, 0, 0]}]),
        "groups[0].trees[0]: broadcast: its root is rank 1; it must be rank 0, the root in parents",
    ),
    "broadcast tree for another world": (
        plan_with(topology="packed", trees=[{"weight": 1, "parents": [-1, 0, 0, 0], "broadcast": [-1, 0]}]),
        "groups[0].trees[0]: broadcast: expected 4 ranks as in parents, got 2",
    ),
    "weightless tree": (
        plan_with(topology="packed", trees=[{"weight": 0, "parents": [-1, 0, 0, 0]}]),
        "groups[0].trees[0].weight: ",
    ),
    "trees on a ring": (
        plan_with(topology="ring", trees=[{"weight": 1, "parents": [-1, 0, 0, 0]}]),
        "trees: only topology 'packed' takes trees",
    ),
    "local aggregation of a collective": (plan_with(local_aggregation=True), "local_aggregation: not allowed with"),
    "segment of a collective": (
        plan_with(segment=4096),
        "segment: not allowed with topology 'native'; allowed with double_tree, ",
    ),
    "ratio of int8": (
        plan_with(compressor={"kind": "int8", "ratio": 0.5}),
        "groups[0].compressor: ratio: compressor 'int8' does not use it",
    ),
    "rank of topk": (plan_with(compressor={"kind": "topk", "rank": 3}), "rank: compressor 'topk' does not use it"),
    "block of a cast": (plan_with(compressor={"kind": "bf16", "block": 8}), "block: compressor 'bf16' does not use it"),
    "tiny segment": (plan_with(topology="ring", segment=8), "groups[0].segment: "),
    "name twice": (
        plan_with() | {"groups": [*plan_with()["groups"], {"name": "all", "variables": ["bias"]}]},
        "groups[1].name: 'all' is used twice",
    ),
    "variable twice": (
        plan_with() | {"groups": [*plan_with()["groups"], {"name": "more", "variables": ["weight"]}]},
        "groups[1].variables: 'weight' is already in group 'all'",
    ),
    "unknown mode": (plan_with() | {"consistency": {"mode": "eventual"}}, "consistency.mode: "),
    "mode without its field": (
        plan_with() | {"consistency": {"mode": "bounded_staleness"}},
        "staleness: missing",
    ),
    "field of another mode": (
        plan_with() | {"consistency": {"mode": "asynchronous", "period": 4}},
        "period: not allowed with mode 'asynchronous'; allowed: no other field",
    ),
    "group larger than the world": (
        plan_with() | {"consistency": {"mode": "partial_reduce", "group_size": 9, "weighting": "constant"}},
        "consistency.group_size: 9 is above world_size 4",
    ),
    "isolation of a periodic plan": (
        plan_with() | {"consistency": {"mode": "periodic", "period": 4, "outer": "averaging", "isolation": 3}},
        "isolation: not allowed with mode 'periodic'; allowed: period, outer, momentum, warmup, fragments, overhead",
    ),
    "outer step size of plain averaging": (
        plan_with() | {"consistency": {"mode": "periodic", "period": 4, "outer": "averaging", "outer_lr": 0.7}},
        "outer_lr: not allowed with outer 'averaging'; allowed with bmuf, slowmo, diloco",
    ),
    "elasticity without a centre": (
        plan_with() | {"consistency": {"mode": "periodic", "period": 4, "outer": "bmuf", "alpha": 0.1}},
        "alpha: not allowed with outer 'bmuf'; allowed with easgd",
    ),
    "a centre that overshoots": (
        plan_with() | {"consistency": {"mode": "periodic", "period": 4, "outer": "easgd", "alpha": 0.4}},
        "consistency.alpha: 0.4 makes the centre of 4 replicas diverge; allowed: below 0.4",
    ),
    "fields of no mode": (
        plan_with() | {"consistency": {"period": 4}},
        "mode: missing, but period given; set mode to one of bounded_staleness, asynchronous, partial_reduce, periodic",
    ),
    "more fragments than steps": (
        plan_with() | {"consistency": {"mode": "periodic", "period": 2, "outer": "diloco", "fragments": 3}},
        "fragments: 3 is above period 2",
    ),
    "fragments with an adapting period": (
        plan_with()
        | {"consistency": {"mode": "periodic", "period": 4, "outer": "diloco", "fragments": 2, "overhead": 0.1}},
        "overhead: not allowed with fragments",
    ),
    "not a number": (plan_with(priority="high"), "groups[0].priority: "),
    "infinite weight": (
        plan_with(partition={"shards": 2, "weights": [1, float("inf")]}),
        "groups[0].partition.weights[1]: ",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_plan(tmp_path: Path, case: str) -> None:
    data, expected = MALFORMED[case]
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(PlanError) as caught:
        SyncPlan.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cut.yaml", "format: autosync-plan/1\nworld_size: 2\ngroups: [{name: a, vari"),
        ("cut.json", '{"format": "autosync-plan/1", "world_'),
        ("binary.yaml", "\x00\x01"),
        ("list.yaml", "- 1\n- 2\n"),
        ("empty.yaml", ""),
    ],
)
def test_damaged_file(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(PlanError, match=name):
        SyncPlan.load(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"nowhere\.yaml: cannot be read"):
        SyncPlan.load(tmp_path / "nowhere.yaml")


WORKLOAD = Workload(
    name="model",
    variables=(
        Variable(name="weight", shape=(6, 4), dtype="float32"),
        Variable(name="bias", shape=(6,), dtype="float64"),
        Variable(name="table", shape=(10, 2), dtype="float32", kind="row_sparse"),
    ),
)
CLUSTER = ClusterSpec.uniform(nodes=4)


def compiled(*groups: dict[str, Any], **fields: Any) -> Schedule:
    named = [{"name": f"g{index}", **group} for index, group in enumerate(groups)]
    data = {"format": "autosync-plan/1", "world_size": 4, "groups": named, **fields}
    return compile_plan(SyncPlan.from_dict(data), WORKLOAD, CLUSTER, source="my.yaml")


REST = {"bias": {"variables": ["bias"]}, "table": {"variables": ["table"]}}


@pytest.mark.parametrize(
    ("groups", "fields", "expected"),
    [
        (
            [{"variables": ["weight"]}],
            {},
            "groups: 2 of the model's 3 parameters are in no group, such as 'bias'; each",
        ),
        ([{"variables": ["gone"]}], {}, "groups[0].variables: the model has no trainable parameter 'gone'"),
        ([{"variables": ["gone", "bias"]}], {}, "'gone' (1 of the plan's 2 parameters are not in it); give a"),
        ([{"variables": ["weight"]}], {"world_size": 3}, "world_size: the plan is for 3 ranks"),
        (
            [{"variables": ["weight"]}, *REST.values()],
            {"workload": "000000000000"},
            "workload: the plan was made for a model with fingerprint 000000000000",
        ),
        (
            [{"variables": ["weight", "bias"]}, REST["table"]],
            {},
            "groups[0] 'g0': variables: a group must have one dtype",
        ),
        (
            [{"variables": ["weight"], "partition": {"axis": 2, "shards": 2}}, *REST.values()],
            {},
            "partition.axis: axis 2 is too large; the variable has shape [6, 4]",
        ),
        (
            [{"variables": ["weight"], "partition": {"axis": 1, "shards": 5}}, *REST.values()],
            {},
            "partition.shards: 5 shards, but only 4 slices along axis 1",
        ),
        (
            [{"variables": ["weight", "table"]}, REST["bias"]],
            {},
            "'table' has row_sparse gradients and needs a group of its own",
        ),
        (
            [{"variables": ["weight"]}, REST["bias"], {"variables": ["table"], "compressor": "int8"}],
            {},
            "compressor: a row_sparse variable cannot be compressed",
        ),
        (
            [
                {"variables": ["weight"]},
                REST["bias"],
                {"variables": ["table"], "partition": {"axis": 1, "shards": 2}},
            ],
            {},
            "partition.axis: a row_sparse variable is cut along its rows",
        ),
        (
            [{"variables": ["weight"]}, *REST.values()],
            {"consistency": {"mode": "asynchronous"}},
            "consistency.mode: 'asynchronous' has no schedule",
        ),
    ],
)
def test_plan_that_does_not_fit(groups: list[dict[str, Any]], fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(PlanError) as caught:
        compiled(*groups, **fields)
    assert str(caught.value).startswith("my.yaml: ")
    assert expected in str(caught.value)


def test_local_aggregation_in_two_levels_warns() -> None:
    groups = builders.all_reduce(WORKLOAD, CLUSTER, topology="hierarchical").groups
    plan = SyncPlan(
        world_size=CLUSTER.world_size,
        groups=tuple(group.model_copy(update={"local_aggregation": True}) for group in groups),
    )
    with pytest.warns(
        FutureWarning, match=r"^plan: groups\[0\] .*: topology 'hierarchical' sums inside nodes in any case"
    ):
        compile_plan(plan, WORKLOAD, CLUSTER)


def test_unmeasured_cluster_has_no_packing() -> None:
    with pytest.raises(ValueError, match="unknown"):
        compiled({"variables": ["weight"], "topology": "packed"}, *REST.values())


def test_unknown_builder() -> None:
    with pytest.raises(PlanError, match=r"neither a file .* nor a builder; allowed: all_reduce"):
        builders.build("fastest", WORKLOAD, CLUSTER)


def test_builders_refuse_impossible_arguments() -> None:
    with pytest.raises(PlanError, match="chunk_size: 0 is below 1"):
        builders.all_reduce(WORKLOAD, CLUSTER, chunk_size=0)
    with pytest.raises(PlanError, match="servers: at least one"):
        builders.ps_load_balancing(WORKLOAD, CLUSTER, servers=[])


def test_overlapping_shards() -> None:
    with pytest.raises(ValueError, match=r"transfers\[1\]: overlap; start is 5, expected"):
        Round(10, (AllReduce(0, 6), AllReduce(5, 10)))
    with pytest.raises(ValueError, match="gap; start is"):
        Round(10, (AllReduce(0, 4), AllReduce(5, 10)))
    with pytest.raises(ValueError, match="but the message has 12 elements"):
        Round(12, (AllReduce(0, 10),))


def test_trees_of_a_transfer_meet_at_one_root() -> None:
    with pytest.raises(ValueError, match="reduce tree ends at rank 0, but the broadcast tree starts at 1"):
        TreeTransfer(0, 4, Tree((-1, 0, 0)), Tree((1, -1, 1)), 4)
    with pytest.raises(ValueError, match="one root"):
        Tree((0, 0))


def test_one_message_says_it_all() -> None:
    with pytest.raises(ValueError, match=r"\(and 1 more\)"):
        SyncPlan.from_dict(plan_with(topology="torus", priority="high"))


def test_group_refuses_unknown_fields_in_python_too() -> None:
    with pytest.raises(ValueError, match="extra"):
        Group(name="a", variables=("b",), colour="red")
