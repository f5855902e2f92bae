"""The choice of a plan if the user gives none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from lightning_autosync.cluster import ClusterSpec, LinkGraph, pack_trees, ring_time, server_shares
from lightning_autosync.plan import Partition, SyncPlan, builders
from lightning_autosync.workload import Workload

LEAST_GAIN = 1.05
"""Predicted speedup over the native all-reduce that another method needs to be chosen."""


ONE_MACHINE_BUCKET = 100 * 2**20
"""Bytes of a message between ranks that share the cores of one machine. There is no idle link to overlap with, and each
message takes time from computation (measured on two cores: DDP's buckets cost up to 8% of a step)."""

LINK_BUCKET = 2**20
"""Bytes of a message on trees and shards, which run concurrently. Small messages start early and end together (measured
on emulated links: 2 to 4 percentage points closer to the bound than with 25 MiB)."""

DDP_BUCKET = 25 * 2**20
"""Bytes of a message in all other cases, as in DDP."""

NATIVE_SECONDS = 0.05
"""Duration of a native all-reduce for which messages are sized on slow links. Smaller messages start earlier, but each
costs some milliseconds of latency (measured on four links of 200 Mbit/s: steps with DDP's 25 MiB took up to 1.17 times
as long)."""


def choose_plan(
    workload: Workload,
    cluster: ClusterSpec,
    known: bool,
    bucket_bytes: int | None = None,
    shares_cores: bool = False,
    sharing_fault: str = "",
) -> tuple[SyncPlan, str]:
    """Choose an exact plan; returns it with one sentence that gives the reason.

    Args:
        workload: the variables.
        cluster: the cluster on which they are synchronized.
        known: whether the user described the cluster. Otherwise, or without rates, there is no prediction.
        bucket_bytes: bytes of a fused message; None for the builders' own size.
        shares_cores: whether the ranks of a node compute on the cores that move its messages.
        sharing_fault: reason why the ranks of a node cannot share memory; empty if they can.
    """
    sizes: dict[str, Any] = {} if bucket_bytes is None else {"bucket_bytes": bucket_bytes}
    fused = serve_rows(builders.all_reduce(workload, cluster, **sizes), workload)
    if cluster.world_size == 1:
        return fused, "there is only one rank, so nothing is synchronized"
    alone = shares_cores and len(cluster.nodes) == 1
    if alone and not sharing_fault:
        summed = serve_rows(builders.shared_memory(workload, cluster, **sizes), workload)
        return summed, "sums in shared memory, because all ranks run on one machine"
    if alone and bucket_bytes is None:
        large = builders.all_reduce(
            workload, cluster, bucket_bytes=ONE_MACHINE_BUCKET, first_bucket_bytes=ONE_MACHINE_BUCKET
        )
        return serve_rows(large, workload), (
            f"large native all-reduces, because all ranks run on one machine but cannot share memory: {sharing_fault}"
        )
    if not known:
        return fused, "fused native all-reduce, because no cluster is described"
    if not cluster.measured:
        return fused, f"fused native all-reduce, because the link rates of cluster '{cluster.name}' are unknown"
    native = ring_time(cluster, workload.bytes)
    contenders: dict[str, tuple[float, Callable[..., SyncPlan]]] = {
        "bandwidth-proportional shards": (shards_time(cluster, workload.bytes), builders.byteps),
        "packed trees": (workload.bytes / pack_trees(cluster).rate, builders.packed_trees),
    }
    name, (best, build) = min(contenders.items(), key=lambda contender: contender[1][0])
    times = f"predicted for cluster '{cluster.name}': {best:.3g} s a step, and {native:.3g} s with a native all-reduce"
    if native <= LEAST_GAIN * best:
        fused = serve_rows(builders.all_reduce(workload, cluster, **(_native_sizes(cluster) | sizes)), workload)
        return (
            fused,
            f"fused native all-reduce, because no other method is more than 5% faster; the best is {name}, {times}",
        )
    return build(workload, cluster, **({"bucket_bytes": LINK_BUCKET} | sizes)), f"{name}, {times}"


def _native_sizes(cluster: ClusterSpec) -> dict[str, Any]:
    """Arguments for DDP's buckets, or for smaller ones if a bucket would take too long on slow links."""
    carried = int(NATIVE_SECONDS / ring_time(cluster, 1.0))
    return {"bucket_bytes": max(LINK_BUCKET, carried)} if carried < DDP_BUCKET else {}


def serve_rows(plan: SyncPlan, workload: Workload) -> SyncPlan:
    """The plan, changed so that every rank sums an equal share of the rows of each row-wise variable.

    The backend's own exchange gathers the rows of all ranks on every rank. It is slower than a dense all-reduce if many
    ranks touch many rows. With shares, rows never cost more than the dense table and the indices.
    """
    groups = [
        group.model_copy(update=_served(plan.world_size, workload.variable(group.variables[0]).shape[0]))
        if workload.variable(group.variables[0]).kind != "dense"
        else group
        for group in plan.groups
    ]
    return plan.model_copy(update={"groups": tuple(groups)})


def _served(ranks: int, rows: int) -> dict[str, Any]:
    shards = min(ranks, rows)
    return {
        "architecture": "parameter_server",
        "topology": "star",
        "partition": Partition(shards=shards),
        "placement": tuple(range(shards)),
    }


def shards_time(cluster: ClusterSpec, size: float) -> float:
    """Seconds to synchronize ``size`` bytes in shards that ranks sum in proportion to the rates of their links."""
    topology = LinkGraph(cluster)
    ranks = range(cluster.world_size)
    loads = numpy.zeros_like(topology.capacities)
    for server, share in zip(ranks, server_shares(cluster), strict=True):
        others = [rank for rank in ranks if rank != server]
        there = [(rank, server) for rank in others]
        back = [(server, rank) for rank in others]
        loads += share * topology.loads(there + back)
    return size * float((loads / topology.capacities).max())
