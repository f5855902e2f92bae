"""Builders of parameter-server plans: one rank reduces each shard and broadcasts the result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_autosync.cluster import ClusterSpec, server_shares
from lightning_autosync.documents import Count, Index
from lightning_autosync.errors import PlanError
from lightning_autosync.plan.builders.grouping import (
    MIB,
    axis_length,
    fused_groups,
    in_ready_order,
    lone_group,
    make_plan,
    smallest_divisor,
    smallest_non_divisor,
)
from lightning_autosync.plan.builders.registry import register
from lightning_autosync.plan.spec import Group, Partition, SyncPlan, TopologyName
from lightning_autosync.workload import Variable, Workload


@register()
def ps(workload: Workload, cluster: ClusterSpec, *, topology: TopologyName = "star", server: Index = 0) -> SyncPlan:
    """AutoDist's PS: one server for everything.

    Raises:
        PlanError: ``server`` is not a rank of the cluster.
    """
    _check_ranks("server", [server], cluster)
    return make_plan(
        workload,
        cluster,
        [_served(variable, [server], topology) for variable in in_ready_order(workload)],
    )


@register()
def ps_load_balancing(
    workload: Workload,
    cluster: ClusterSpec,
    *,
    topology: TopologyName = "star",
    servers: Sequence[Index] | None = None,
) -> SyncPlan:
    """AutoDist's PSLoadBalancing: each variable goes to the server with the fewest bytes so far."""
    loads = _Loads(cluster, servers)
    groups = [_served(variable, [loads.add(variable.bytes)], topology) for variable in in_ready_order(workload)]
    return make_plan(workload, cluster, groups)


@register()
def partitioned_ps(
    workload: Workload,
    cluster: ClusterSpec,
    *,
    topology: TopologyName = "star",
    servers: Sequence[Index] | None = None,
) -> SyncPlan:
    """AutoDist's PartitionedPS: cut each variable along axis 0 and place the shards on the least loaded servers.

    The number of shards is the smallest divisor of the axis length.
    """
    loads = _Loads(cluster, servers)
    groups = [
        _served_in_shards(variable, smallest_divisor(axis_length(variable)), loads, topology)
        for variable in in_ready_order(workload)
    ]
    return make_plan(workload, cluster, groups)


@register()
def uneven_partitioned_ps(
    workload: Workload,
    cluster: ClusterSpec,
    *,
    topology: TopologyName = "star",
    servers: Sequence[Index] | None = None,
) -> SyncPlan:
    """AutoDist's UnevenPartitionedPS: like PartitionedPS, with the smallest number that does not divide the axis."""
    loads = _Loads(cluster, servers)
    groups = [
        _served_in_shards(variable, smallest_non_divisor(axis_length(variable)), loads, topology)
        for variable in in_ready_order(workload)
    ]
    return make_plan(workload, cluster, groups)


@register()
def byteps(
    workload: Workload, cluster: ClusterSpec, *, topology: TopologyName = "star", bucket_bytes: Count = 25 * MIB
) -> SyncPlan:
    """Fused messages cut over all ranks in proportion to the rates of their links.

    On one switch with uneven links this reaches the minimal time (BytePS, OSDI 2020, section 4.1, for servers that are
    also workers). Without known rates the shards are equal.
    """
    shares = server_shares(cluster) if cluster.measured else (1.0,) * cluster.world_size
    aspects = {
        "architecture": "parameter_server",
        "topology": topology,
        "partition": Partition(shards=cluster.world_size, weights=shares),
        "placement": tuple(range(cluster.world_size)),
    }
    variables = in_ready_order(workload)
    cuttable = [variable for variable in variables if variable.numel >= cluster.world_size]
    groups = list(fused_groups([v for v in cuttable if _rows_fit(v, cluster)], [bucket_bytes], "bucket", **aspects))
    whole = [variable for variable in variables if variable not in cuttable or not _rows_fit(variable, cluster)]
    loads = _Loads(cluster, None)
    groups += [_served(variable, [loads.add(variable.bytes)], topology) for variable in whole]
    return make_plan(workload, cluster, groups)


def _rows_fit(variable: Variable, cluster: ClusterSpec) -> bool:
    return variable.kind == "dense" or variable.shape[0] >= cluster.world_size


class _Loads:
    """Bytes given to each server so far."""

    def __init__(self, cluster: ClusterSpec, servers: Sequence[int] | None) -> None:
        self._loads = dict.fromkeys(servers if servers is not None else range(cluster.world_size), 0.0)
        if not self._loads:
            raise PlanError("servers: at least one rank is needed")
        _check_ranks("servers", self._loads, cluster)

    def add(self, size: float) -> int:
        """Give ``size`` bytes to the least loaded server; returns its rank."""
        server = min(self._loads, key=lambda rank: (self._loads[rank], rank))
        self._loads[server] += size
        return server


def _check_ranks(argument: str, ranks: Iterable[int], cluster: ClusterSpec) -> None:
    for rank in ranks:
        if rank not in range(cluster.world_size):
            raise PlanError(f"{argument}: rank {rank} is out of range; the cluster has {cluster.world_size} ranks")


def _served(variable: Variable, placement: Sequence[int], topology: TopologyName) -> Group:
    partition = Partition(axis=0, shards=len(placement)) if len(placement) > 1 else None
    return lone_group(
        variable,
        architecture="parameter_server",
        topology=topology,
        partition=partition,
        placement=tuple(placement),
    )


def _served_in_shards(variable: Variable, shards: int, loads: _Loads, topology: TopologyName) -> Group:
    return _served(variable, [loads.add(variable.bytes / shards) for _ in range(shards)], topology)
