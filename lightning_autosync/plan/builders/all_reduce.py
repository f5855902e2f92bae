"""Builders of all-reduce plans, also for ranks that share memory."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import Count, Integer
from lightning_autosync.errors import PlanError
from lightning_autosync.plan.builders.grouping import (
    MIB,
    axis_length,
    fused_groups,
    in_ready_order,
    lone_group,
    make_plan,
    smallest_divisor,
)
from lightning_autosync.plan.builders.registry import register
from lightning_autosync.plan.spec import Compressor, Group, Partition, SyncPlan, TopologyName
from lightning_autosync.workload import Variable, Workload


@register()
def all_reduce(
    workload: Workload,
    cluster: ClusterSpec,
    *,
    topology: TopologyName = "native",
    bucket_bytes: Count = 25 * MIB,
    first_bucket_bytes: Count = MIB,
    chunk_size: Count | None = None,
    compressor: Compressor | Mapping[str, Any] | str = "none",
) -> SyncPlan:
    """Fused all-reduce: DDP's buckets, or AutoDist's AllReduce if ``chunk_size`` is given.

    Args:
        workload: the variables.
        cluster: the cluster on which they are synchronized.
        topology: topology of each message.
        bucket_bytes: bytes at which a message closes (DDP's ``bucket_cap_mb``).
        first_bucket_bytes: the same for the first message; smaller, so that communication starts early.
        chunk_size: number of variables per message, in model order and of any size (AutoDist: 128).
        compressor: kind or settings of the compressor of dense messages.

    Raises:
        PlanError: ``chunk_size`` is below 1.
    """
    aspects = {"topology": topology, "compressor": compressor}
    if chunk_size is None:
        limits = [min(first_bucket_bytes, bucket_bytes), bucket_bytes]
        groups = list(fused_groups(in_ready_order(workload), limits, "bucket", **aspects))
    else:
        if chunk_size < 1:
            raise PlanError(f"chunk_size: {chunk_size} is below 1")
        groups = []
        for chunk, start in enumerate(range(0, len(workload.variables), chunk_size)):
            members = workload.variables[start : start + chunk_size]
            groups += fused_groups(members, [workload.bytes + 1], f"chunk{chunk}.", **aspects)
        groups.reverse()
    return make_plan(workload, cluster, groups)


@register()
def partitioned_all_reduce(workload: Workload, cluster: ClusterSpec, *, topology: TopologyName = "native") -> SyncPlan:
    """AutoDist's PartitionedAR: cut each variable along axis 0 into as many shards as the axis' smallest divisor."""
    return make_plan(
        workload,
        cluster,
        [_partitioned(variable, 0, topology) for variable in in_ready_order(workload)],
    )


@register()
def random_axis_partitioned_all_reduce(
    workload: Workload, cluster: ClusterSpec, *, topology: TopologyName = "native", seed: Integer = 0
) -> SyncPlan:
    """AutoDist's RandomAxisPartitionAR: like PartitionedAR, but along a random axis longer than 1."""
    draw = random.Random(seed)
    groups = []
    for variable in in_ready_order(workload):
        axes = [axis for axis, length in enumerate(variable.shape) if length > 1]
        axis = draw.choice(axes) if axes and variable.kind == "dense" else 0
        groups.append(_partitioned(variable, axis, topology))
    return make_plan(workload, cluster, groups)


def _partitioned(variable: Variable, axis: int, topology: TopologyName) -> Group:
    shards = smallest_divisor(axis_length(variable, axis))
    partition = Partition(axis=axis, shards=shards) if shards > 1 else None
    return lone_group(variable, topology=topology, partition=partition)


@register(takes_topology=False)
def shared_memory(workload: Workload, cluster: ClusterSpec, *, bucket_bytes: Count = 100 * MIB) -> SyncPlan:
    """Fused dense variables in memory that all ranks map; row-wise variables by the backend's collectives.

    Messages are large, because there is no wire time to overlap and each message costs two hand-overs between the
    ranks. `compile_plan` refuses the plan for a cluster of several nodes.

    Args:
        workload: the variables.
        cluster: the single node on which they are synchronized.
        bucket_bytes: bytes at which a message closes.
    """
    ordered = in_ready_order(workload)
    dense = [variable for variable in ordered if variable.kind == "dense"]
    groups = list(fused_groups(dense, [bucket_bytes], "shared", topology="shared_memory"))
    groups += [lone_group(variable) for variable in ordered if variable.kind != "dense"]
    return make_plan(workload, cluster, groups)
