"""Clusters that many tests use."""

from __future__ import annotations

from lightning_autosync.cluster import ClusterSpec


def uneven_cluster(size: int) -> ClusterSpec:
    """A fat node and slow leaves on one switch."""
    return ClusterSpec.star(bandwidths=[4e7, *[1e7] * (size - 1)])


def shared_nodes(size: int) -> ClusterSpec:
    """Nodes of two devices, the last of one if the number is odd."""
    devices = [2] * (size // 2) + [1] * (size % 2)
    nodes = [{"name": f"n{index}", "devices": count} for index, count in enumerate(devices)]
    links = [{"a": node["name"], "b": "switch", "bandwidth": 1e7} for node in nodes]
    return ClusterSpec.from_dict(
        {
            "format": ClusterSpec.FORMAT,
            "name": "shared_nodes",
            "nodes": nodes,
            "switches": ["switch"],
            "links": links,
        }
    )
