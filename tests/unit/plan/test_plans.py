"""Plans as data: files, fingerprints, semantics, tables."""

from __future__ import annotations

import json
import sys

import forked
import pytest
from clusters import shared_nodes
from hypothesis import given
from hypothesis import strategies as st
from plans import plans
from schemas import check_schema
from sweeps import examples

from lightning_autosync.plan import (
    Compressor,
    Consistency,
    Group,
    SyncPlan,
    Tree,
    TreeTransfer,
    WeightedTree,
    builders,
    compile_plan,
    topologies,
)
from lightning_autosync.workload import Variable, Workload

WORKLOAD = Workload(
    name="model",
    variables=(
        Variable(name="conv.weight", shape=(8, 3, 3, 3), dtype="float32"),
        Variable(name="conv.bias", shape=(8,), dtype="float32"),
        Variable(name="scale", shape=(), dtype="float32"),
        Variable(name="fc.weight", shape=(10, 72), dtype="float32"),
        Variable(name="half", shape=(5, 5), dtype="bfloat16"),
        Variable(name="table", shape=(40, 6), dtype="float32", kind="row_sparse"),
    ),
)


@examples(25)
@given(st.data())
@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_files_keep_everything(tmp_path_factory: pytest.TempPathFactory, suffix: str, data: st.DataObject) -> None:
    lossy = data.draw(st.booleans())
    workload = WORKLOAD.model_copy(update={"variables": WORKLOAD.variables[:5]}) if lossy else WORKLOAD
    plan = data.draw(plans(workload, 4, lossy=lossy))
    path = tmp_path_factory.mktemp("plans") / f"plan.{suffix}"
    plan.save(path)
    loaded = SyncPlan.load(path)
    assert loaded == plan
    assert loaded.fingerprint == plan.fingerprint
    check_schema(SyncPlan, json.loads(json.dumps(plan.to_dict())))


@examples(60)
@given(st.data())
def test_schedules_cover_every_element_once(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 7))
    plan = data.draw(plans(WORKLOAD, size))
    schedule = compile_plan(plan, WORKLOAD, shared_nodes(size))
    assert schedule.fingerprint == compile_plan(plan, WORKLOAD, shared_nodes(size)).fingerprint
    for message in schedule.messages:
        (only,) = message.rounds  # its constructor refuses gaps and overlaps
        assert only.length == message.numel + message.tail
        assert message.numel == sum(WORKLOAD.variable(name).numel for name in message.variables)


def test_the_schema_is_written_to_a_file(tmp_path) -> None:
    path = tmp_path / "plan.schema.json"
    assert forked.run([sys.executable, "-m", "lightning_autosync.plan.schema", path]).returncode == 0
    schema = json.loads(path.read_text())
    assert schema == SyncPlan.json_schema()
    assert schema["$defs"]["Group"]["properties"]["topology"]["enum"] == list(topologies.names())


def test_fingerprints_do_not_change_between_releases() -> None:
    assert builders.all_reduce(WORKLOAD, shared_nodes(4)).fingerprint == "2c707a06160c"
    star, line = WeightedTree(weight=2, parents=(-1, 0, 0)), WeightedTree(weight=1, parents=(1, -1, 1))
    group = Group(name="all", variables=("w",), topology="packed", trees=(star, line))
    assert SyncPlan(world_size=3, groups=(group,)).fingerprint == "5a6f5a17309e"


@pytest.mark.parametrize("root", [None, 2])
def test_a_pair_of_trees_reduces_along_one_and_broadcasts_along_the_other(root: int | None) -> None:
    pair = WeightedTree(weight=1, parents=(-1, 0, 1, 2), broadcast=(-1, 3, 1, 0))
    served = {} if root is None else {"architecture": "parameter_server", "placement": (root,)}
    workload = WORKLOAD.model_copy(update={"variables": WORKLOAD.variables[:1]})
    plan = SyncPlan(
        world_size=4,
        groups=(Group(name="a", variables=("conv.weight",), topology="packed", trees=(pair,), **served),),
    )
    (transfer,) = compile_plan(plan, workload, shared_nodes(4)).messages[0].rounds[0].transfers
    assert isinstance(transfer, TreeTransfer)
    up, down = Tree(pair.parents), Tree(pair.broadcast or ())
    assert (transfer.reduce, transfer.broadcast) == (up.rerooted(root or 0), down.rerooted(root or 0))
    assert "1 tree pairs" in plan.describe()


@pytest.mark.parametrize(
    ("compressor", "consistency", "semantics"),
    [
        ("none", Consistency(), "exact"),
        ("bf16", Consistency(), "compressed"),
        ("none", Consistency(mode="periodic", period=4, outer="diloco"), "relaxed"),
        ("topk", Consistency(mode="asynchronous"), "relaxed"),
    ],
)
def test_semantics(compressor: str, consistency: Consistency, semantics: str) -> None:
    group = Group(name="a", variables=("w",), compressor=Compressor(kind=compressor))
    assert SyncPlan(world_size=2, consistency=consistency, groups=(group,)).semantics == semantics


@pytest.mark.parametrize("builder", builders.names())
def test_table_names_every_group(builder: str) -> None:
    plan = builders.build(builder, WORKLOAD, shared_nodes(4))
    table = plan.describe(WORKLOAD)
    for group in plan.groups:
        assert group.name in table
    assert "exact" in table
    assert "size" in table
