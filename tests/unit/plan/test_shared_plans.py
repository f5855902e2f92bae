"""Plans and schedules that sum in shared memory."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import PlanError
from lightning_autosync.plan import Group, SharedMemoryReduce, SyncPlan, builders, compile_plan
from lightning_autosync.workload import Variable, Workload

MACHINE = ClusterSpec.uniform(1, devices=2)


def workload(*sizes: int, kind: str = "dense", dtype: str = "float32") -> Workload:
    variables = (Variable(name=f"v{n}", shape=(size, 2), dtype=dtype, kind=kind) for n, size in enumerate(sizes))
    return Workload(name="made", variables=tuple(variables))


@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    ranks=st.integers(1, 7),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
    bucket=st.integers(1, 4000),
)
def test_every_element_is_summed_by_one_rank_and_parts_meet_between_cache_lines(sizes, ranks, dtype, bucket) -> None:
    model = workload(*sizes, dtype=dtype)
    cluster = ClusterSpec.uniform(1, devices=ranks)
    plan = builders.shared_memory(model, cluster, bucket_bytes=bucket)
    assert plan.semantics == "exact"
    itemsize = {"float16": 2, "float32": 4, "float64": 8}[dtype]
    for message in compile_plan(plan, model, cluster).messages:
        (transfer,) = message.rounds[0].transfers
        assert isinstance(transfer, SharedMemoryReduce)
        assert message.in_shared_memory
        assert not message.collective
        assert not message.on_trees
        assert len(transfer.bounds) == ranks + 1
        assert (transfer.start, transfer.stop) == (0, message.numel + message.tail)
        line = 64 // itemsize
        for lower, upper in pairwise(transfer.bounds):
            assert lower <= upper
            assert upper - lower <= message.rounds[0].length / ranks + line + 1
            assert upper == transfer.stop or upper % line == 0


def test_shards_of_a_message_are_each_shared_out() -> None:
    model = workload(100)
    plan = SyncPlan.from_dict(
        {
            "format": SyncPlan.FORMAT,
            "world_size": 2,
            "groups": [
                {"name": "a", "variables": ["v0"], "topology": "shared_memory", "partition": {"axis": 1, "shards": 2}}
            ],
        }
    )
    (message,) = compile_plan(plan, model, MACHINE).messages
    assert [transfer.bounds for transfer in message.rounds[0].transfers] == [(0, 48, 100), (100, 144, 201)]
    assert "shared_memory" in plan.describe(model)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architecture": "parameter_server"}, "topology: 'shared_memory' does not support 'parameter_server'"),
        ({"compressor": "bf16"}, "compressor must be 'none'"),
        ({"local_aggregation": True}, "local_aggregation: not allowed with topology 'shared_memory'"),
    ],
)
def test_what_shared_memory_cannot_do(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Group(name="a", variables=("v0",), topology="shared_memory", **fields)


def test_several_nodes_share_no_memory() -> None:
    model = workload(10)
    cluster = ClusterSpec.uniform(2, devices=2)
    words = r"groups\[0\] 'shared0': topology: 'shared_memory' needs all ranks on one node, but cluster 'uniform' has"
    with pytest.raises(PlanError, match=words):
        compile_plan(builders.shared_memory(model, cluster), model, cluster)


@pytest.mark.parametrize("kind", ["sparse", "row_sparse"])
def test_rows_are_not_summed_in_shared_memory(kind: str) -> None:
    model = workload(10, kind=kind)
    (group,) = builders.shared_memory(model, MACHINE).groups
    assert group.topology == "native"
    wrong = builders.all_reduce(model, MACHINE, topology="shared_memory")
    with pytest.raises(PlanError, match=f"'shared_memory' takes dense gradients only, but 'v0' has {kind} gradients"):
        compile_plan(wrong, model, MACHINE)
