"""Layouts of parameter servers: every element is kept exactly once, where the plan says."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import plans
from sweeps import examples

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import PlanError
from lightning_autosync.plan import Group, Partition, SyncPlan, compile_plan
from lightning_autosync.plan.servers import ServerLayout, server_layout
from lightning_autosync.workload import Variable, Workload

WORKLOAD = Workload(
    name="small",
    variables=(
        Variable(name="scale", shape=(), dtype="float64"),
        Variable(name="kernel", shape=(3, 5, 2)),
        Variable(name="bias", shape=(7,)),
        Variable(name="table", shape=(9, 4), kind="sparse"),
        Variable(name="tags", shape=(6, 2, 2), kind="row_sparse"),
    ),
)


@examples()
@given(data=st.data())
def test_every_element_has_one_server(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 5))
    plan = data.draw(plans(WORKLOAD, size))
    groups = tuple(group.model_copy(update={"local_aggregation": False}) for group in plan.groups)
    layout = server_layout(plan.model_copy(update={"groups": groups}), WORKLOAD)
    kept: dict[str, list[int]] = {variable.name: [] for variable in WORKLOAD.variables}
    for number, shard in enumerate(layout.shards):
        assert shard.index == number
        assert 0 <= shard.owner < size
        assert shard.numel > 0
        for piece in shard.pieces:
            kept[piece.variable] += range(piece.start, piece.stop)
            if shard.width:
                assert piece.start % shard.width == piece.stop % shard.width == 0
    for variable in WORKLOAD.variables:
        assert sorted(kept[variable.name]) == list(range(variable.numel))
    assert sum(shard.bytes for shard in layout.shards) == WORKLOAD.bytes
    assert ServerLayout.from_dict(json.loads(json.dumps(layout.to_dict()))) == layout


def plan_of(**fields: Any) -> SyncPlan:
    group = {"name": "all", "variables": ["kernel", "bias"], "architecture": "parameter_server", "topology": "star"}
    rest = [
        {"name": name, "variables": [name], "architecture": "parameter_server", "topology": "star"}
        for name in ("scale", "table", "tags")
    ]
    group.update(fields.pop("group", {}))
    return SyncPlan.from_dict({"format": SyncPlan.FORMAT, "world_size": 2, "groups": [group, *rest], **fields})


def test_servers_may_be_processes_of_their_own() -> None:
    plan = plan_of(servers=2, group={"partition": {"shards": 2, "weights": [1.0, 3.0]}, "placement": [2, 3]})
    layout = server_layout(plan, WORKLOAD)
    assert layout.owners == (0, 2, 3)
    assert [shard.numel for shard in layout.of(2)] == [9]
    assert [shard.numel for shard in layout.of(3)] == [28]
    assert [(piece.variable, piece.start, piece.stop) for piece in layout.of(3)[0].pieces] == [
        ("kernel", 9, 30),
        ("bias", 0, 7),
    ]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mode": (
        {"consistency": {"mode": "periodic", "period": 2, "outer": "averaging"}},
        "plan: consistency.mode: 'periodic' does not use parameter servers; allowed: synchronous, bounded_staleness",
    ),
    "compressor": (
        {"group": {"compressor": "fp16"}},
        "plan: groups[0] 'all': compressor: servers take uncompressed gradients; only 'none' is allowed, not 'fp16'",
    ),
    "mixed": (
        {"group": {"local_aggregation": True}},
        "plan: groups[1] 'scale': local_aggregation: differs from group 'all'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_servers_cannot_do_is_refused(case: str) -> None:
    fields, message = REFUSED[case]
    with pytest.raises(PlanError, match=re.escape(message)):
        server_layout(plan_of(**fields), WORKLOAD)


def test_placement_beyond_the_servers_is_refused() -> None:
    with pytest.raises(PlanError, match=r"rank 3 is out of range; world_size is 2, servers is 1"):
        plan_of(servers=1, group={"placement": [3]})


def test_schedules_have_no_server_only_ranks() -> None:
    with pytest.raises(PlanError, match="servers: 1 server-only ranks"):
        compile_plan(plan_of(servers=1), WORKLOAD, ClusterSpec.star(bandwidths=[1e7, 1e7]))


def test_parts_of_an_all_reduce_are_cut_between_slices_of_its_axis() -> None:
    workload = Workload(name="one", variables=(Variable(name="a", shape=(10, 10)),))
    group = Group(name="a", variables=("a",), partition=Partition(axis=1, shards=2))
    made = server_layout(SyncPlan(world_size=3, consistency={"mode": "asynchronous"}, groups=(group,)), workload)
    assert sum(shard.numel for shard in made.shards) == 100
    assert all(piece.start % 10 == 0 and piece.stop % 10 == 0 for shard in made.shards for piece in shard.pieces)
