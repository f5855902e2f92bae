"""Clusters as emulated links show them."""

from __future__ import annotations

from lightning_autosync.cluster import ClusterSpec


def emulable(cluster: ClusterSpec, fastest: float) -> ClusterSpec:
    """The cluster slowed down until no link carries more than ``fastest`` bytes/s; links without latency."""
    rates = [rate for link in cluster.links for rate in (link.bandwidth, link.reverse_bandwidth) if rate is not None]
    scaled = cluster.scaled(min(1.0, fastest / max(rates))) if rates else cluster
    data = scaled.to_dict()
    data["links"] = [{**link, "latency": 0.0} for link in data.get("links", [])]
    return ClusterSpec.from_dict(data)
