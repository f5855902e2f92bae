"""Parts of the default plan: sizes of messages, and the method that suits the links."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy

from lightning_autosync.cluster import ClusterSpec, LinkGraph, pack_trees, ring_time, server_shares
from lightning_autosync.plan.builders.grouping import MIB
from lightning_autosync.plan.builders.links import packed_trees
from lightning_autosync.plan.builders.parameter_server import byteps
from lightning_autosync.plan.spec import SyncPlan
from lightning_autosync.workload import Workload

LINK_BUCKET = MIB
"""Bytes of a message on trees and shards, which run concurrently. Small messages start early and end together (measured
on emulated links: 2 to 4 percentage points closer to the bound than with 25 MiB)."""

DDP_BUCKET = 25 * MIB
"""Bytes of a message in all other cases, as in DDP."""
SEARCHED = "a plan found by search"
"""Name of plans that are no builder's, for messages and tables."""
DDP_BUCKETS = "DDP's buckets"
"""Name of the sizes of messages that DDP has by default."""
NATIVE = "all_reduce"
"""Name of the native all-reduce with messages that are sized for the links; the name of its builder."""

NATIVE_SECONDS = 0.05
"""Duration of a native all-reduce for which messages are sized on slow links. Smaller messages start earlier, but each
costs some milliseconds of latency (measured on four links of 200 Mbit/s: steps with DDP's 25 MiB took up to 1.17 times
as long)."""

SHARED_CORES_BUCKET = 100 * MIB
"""Bytes of a message where the cores that all ranks share, and not the links, limit how fast gradients travel. There is
no idle link to overlap with, and each message takes time from computation (measured on two cores: DDP's buckets cost 0%
to 8% of a step)."""

BUSY_CORES = 0.45
"""Core time of an all-reduce, relative to its time on the links, from which the cores count as the limit. Measured with
computation on all of two cores: at ratios of 0.56 and more, one message was 3% to 8% faster than DDP's buckets in most
runs (with four ranks at 0.56 about as fast), and 2% to 5% slower at 0.28."""


class LinkMethod(NamedTuple):
    """A method that follows the rates of the links.

    Attributes:
        name: its name in sentences.
        seconds: seconds to synchronize all gradients if only the links count.
        build: its builder.
    """

    name: str
    seconds: float
    build: Callable[..., SyncPlan]


def native_name(sizes: str) -> str:
    """The name of a native all-reduce with messages of other sizes than `NATIVE`, which ``sizes`` describes."""
    return f"{NATIVE} ({sizes})"


def is_native(name: str) -> bool:
    """Whether a plan is a native all-reduce as DDP's, with messages of any size, by its name.

    Its messages do not tell: rows of embeddings take other ways in it, and a plan of the search may have native ones.
    """
    return name == NATIVE or name.startswith(f"{NATIVE} (")


def link_method(workload: Workload, cluster: ClusterSpec) -> LinkMethod:
    """The faster one of bandwidth-proportional shards and packed trees on a cluster with known rates."""
    shards = LinkMethod("bandwidth-proportional shards", shards_time(cluster, workload.bytes), byteps)
    trees = LinkMethod("packed trees", workload.bytes / pack_trees(cluster).rate, packed_trees)
    return min(shards, trees, key=lambda method: method.seconds)


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


def native_sizes(cluster: ClusterSpec, host_cost: float = 0.0) -> dict[str, Any]:
    """Arguments of `all_reduce` for buckets as in DDP, or others that suit the links.

    Buckets are smaller if DDP's would take too long on slow links, and larger if `cores_limit`.

    Args:
        host_cost: as for `cores_limit`.
    """
    if cores_limit(cluster, host_cost):
        return {"bucket_bytes": SHARED_CORES_BUCKET, "first_bucket_bytes": SHARED_CORES_BUCKET}
    carried = int(NATIVE_SECONDS / ring_time(cluster, 1.0))
    return {"bucket_bytes": max(LINK_BUCKET, carried)} if carried < DDP_BUCKET else {}


def cores_limit(cluster: ClusterSpec, host_cost: float) -> bool:
    """Whether cores that all ranks share, and not the links, limit how fast an all-reduce is.

    Args:
        cluster: a cluster with known rates.
        host_cost: seconds in which these cores let all ranks send, or receive, a byte each; 0 if ranks share no cores,
            or compute elsewhere.
    """
    ranks = cluster.world_size
    return host_cost * 4 * (ranks - 1) / ranks > BUSY_CORES * ring_time(cluster, 1.0)
