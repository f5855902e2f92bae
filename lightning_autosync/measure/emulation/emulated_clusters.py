"""Clusters as emulated links show them."""

from __future__ import annotations

from lightning_autosync.cluster import ClusterSpec


def emulable(cluster: ClusterSpec, fastest: float) -> ClusterSpec:
    """The cluster slowed down until no link carries more than ``fastest`` bytes/s, and as emulated links show it."""
    rates = [rate for link in cluster.links for rate in (link.bandwidth, link.reverse_bandwidth) if rate is not None]
    return cluster.scaled(min(1.0, fastest / max(rates, default=1.0))).as_emulated()
