"""The cluster: machines and links, channels and routes, bounds on synchronization, and packed trees."""

from __future__ import annotations

from lightning_autosync.cluster.bounds import (
    Limit,
    binding_channels,
    least_step_time,
    one_switch_time,
    ring_time,
    server_shares,
    synchronization_limit,
    synchronization_rate,
    synchronization_time,
)
from lightning_autosync.cluster.broadcasts import BroadcastPacking, pack_broadcasts
from lightning_autosync.cluster.files import (
    configuration_directory,
    read_resource_spec,
    resolve_cluster,
    shipped_clusters,
)
from lightning_autosync.cluster.link_graph import Channel, LinkGraph
from lightning_autosync.cluster.packing import PackedTree, TreePacking, pack_trees
from lightning_autosync.cluster.spec import ClusterSpec, Interface, Link, Node
from lightning_autosync.cluster.units import (
    FRAMING,
    PAYLOAD_SHARE,
    Bytes,
    Rate,
    Seconds,
    parse_bytes,
    parse_rate,
    parse_seconds,
)

__all__ = [
    "FRAMING",
    "PAYLOAD_SHARE",
    "BroadcastPacking",
    "Bytes",
    "Channel",
    "ClusterSpec",
    "Interface",
    "Limit",
    "Link",
    "LinkGraph",
    "Node",
    "PackedTree",
    "Rate",
    "Seconds",
    "TreePacking",
    "binding_channels",
    "configuration_directory",
    "least_step_time",
    "one_switch_time",
    "pack_broadcasts",
    "pack_trees",
    "parse_bytes",
    "parse_rate",
    "parse_seconds",
    "read_resource_spec",
    "resolve_cluster",
    "ring_time",
    "server_shares",
    "shipped_clusters",
    "synchronization_limit",
    "synchronization_rate",
    "synchronization_time",
]
