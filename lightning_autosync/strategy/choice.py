"""The choice of a plan if the user gives none."""

from __future__ import annotations

from typing import Any, NamedTuple

from lightning_autosync.cluster import ClusterSpec, ring_time
from lightning_autosync.documents import seconds_text
from lightning_autosync.plan import SyncPlan, builders
from lightning_autosync.plan.builders.default import (
    LINK_BUCKET,
    SHARED_CORES_BUCKET,
    cores_limit,
    link_method,
    native_sizes,
)
from lightning_autosync.plan.builders.rows import place_rows, serve_rows
from lightning_autosync.replay import Constants
from lightning_autosync.workload import Workload

LEAST_GAIN = 1.05
"""Predicted speedup over the native all-reduce that another method needs to be chosen."""

GAIN_ON_SHARED_CORES = 1.25
"""The same where shared cores limit a native all-reduce. Predictions leave out the computation, which takes the cores
from messages: plans that were predicted to be 9% faster were not."""

CORES_LIMIT = "all ranks share the cores of one machine, which limit how fast gradients travel"
"""What `cores_limit` tells, in words."""


def choose_plan(
    workload: Workload,
    cluster: ClusterSpec,
    known: bool,
    bucket_bytes: int | None = None,
    shares_cores: bool = False,
    sharing_fault: str = "",
    accelerated: bool = False,
    cores: float | None = None,
) -> tuple[SyncPlan, str]:
    """Choose an exact plan; returns it with one sentence that gives the reason.

    Args:
        known: whether the user described the cluster. Otherwise, or without rates, there is no prediction.
        bucket_bytes: bytes of a fused message; None for the builders' own size.
        shares_cores: whether the ranks of a node compute on the cores that move its messages.
        sharing_fault: reason why the ranks of a node cannot share memory; empty if they can.
        accelerated: whether gradients are on accelerators. Their costs are not known, so that no prediction decides
            there.
        cores: number of cores that all ranks share, also if they are described as several nodes; None if each rank has
            its own.
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
            workload, cluster, bucket_bytes=SHARED_CORES_BUCKET, first_bucket_bytes=SHARED_CORES_BUCKET
        )
        return serve_rows(large, workload), (
            f"large native all-reduces, because all ranks run on one machine but cannot share memory: {sharing_fault}"
        )
    if accelerated:
        return (
            fused,
            "fused native all-reduce, because on accelerators other plans are measured only if asked for",
        )
    if not known:
        return fused, "fused native all-reduce, because no cluster is described"
    if not cluster.measured:
        return fused, f"fused native all-reduce, because the link rates of cluster '{cluster.name}' are unknown"
    host_cost = Constants(cores=cores).shared_host_cost(cluster.world_size)
    limited = bucket_bytes is None and cores_limit(cluster, host_cost)
    least_gain = GAIN_ON_SHARED_CORES if limited else LEAST_GAIN
    native, linked = plans_by_formula(workload, cluster, bucket_bytes, host_cost)
    times = f"predicted for cluster '{cluster.name}': {synchronization_times(linked.seconds, native.seconds)}"
    if any(variable.kind != "dense" for variable in workload.variables):
        times += "; touched rows of embeddings are sent in addition"
    if native.seconds <= least_gain * linked.seconds:
        if limited:
            times += f"; in large messages, because {CORES_LIMIT}"
        return (
            native.plan,
            f"fused native all-reduce, because no other method is more than {least_gain - 1:.0%} faster. The best is "
            f"{linked.name}, {times}",
        )
    return linked.plan, f"{linked.name}, {times}"


def synchronization_times(seconds: float, native: float) -> str:
    """Seconds of a plan beside those of a native all-reduce, in words that tell them from the time of a step."""
    return (
        f"synchronization alone, without computation, takes {seconds_text(seconds)}, and {seconds_text(native)} with a "
        "native all-reduce"
    )


class FormulaPlan(NamedTuple):
    """A plan whose time is known from a formula.

    Attributes:
        seconds: seconds to synchronize the dense gradients if only the links count.
        name: name of its method in sentences.
        builder: name of its builder.
    """

    plan: SyncPlan
    seconds: float
    name: str
    builder: str


def plans_by_formula(
    workload: Workload, cluster: ClusterSpec, bucket_bytes: int | None = None, host_cost: float = 0.0
) -> tuple[FormulaPlan, FormulaPlan]:
    """The native all-reduce, and the method that suits the links best; for clusters with known rates.

    Args:
        bucket_bytes: bytes of a fused message; None for sizes that suit the links.
        host_cost: as for `cores_limit`.
    """
    sizes: dict[str, Any] = {} if bucket_bytes is None else {"bucket_bytes": bucket_bytes}
    dense = sum(variable.bytes for variable in workload.variables if variable.kind == "dense")
    share = max(dense, 1) / workload.bytes
    name, best, build = link_method(workload, cluster)
    native = builders.all_reduce(workload, cluster, **(native_sizes(cluster, host_cost) | sizes))
    linked = build(workload, cluster, **({"bucket_bytes": LINK_BUCKET} | sizes))
    return (
        FormulaPlan(
            place_rows(native, workload, cluster),
            share * ring_time(cluster, workload.bytes),
            "fused native all-reduce",
            "all_reduce",
        ),
        FormulaPlan(place_rows(linked, workload, cluster), share * best, name, build.__name__),
    )
