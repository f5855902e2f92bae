"""Clusters that many tests use."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from random import Random

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


def asymmetric_cluster(shape: str, size: int, random: Random) -> ClusterSpec:
    """A ring, mesh, star or two racks of ``size`` nodes; each direction of a link has a random rate up to 1 : 10."""
    nodes = [f"n{index}" for index in range(size)]
    switches: list[str] = []
    if shape == "ring":
        ends = list(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
    elif shape == "mesh":
        ends = list(combinations(nodes, 2))
    elif shape == "star":
        switches = ["switch"]
        ends = [(node, "switch") for node in nodes]
    else:
        switches = ["left", "right", "core"]
        ends = [*((node, switches[place % 2]) for place, node in enumerate(nodes)), ("left", "core"), ("right", "core")]
    links = [
        {"a": a, "b": b, "bandwidth": random.uniform(1e7, 1e8), "reverse_bandwidth": random.uniform(1e7, 1e8)}
        for a, b in ends
    ]
    fields = {"name": shape, "nodes": [{"name": node} for node in nodes], "switches": switches, "links": links}
    return ClusterSpec.from_dict({"format": ClusterSpec.FORMAT, **fields})


def two_interfaces(
    first: Sequence[float], second: Sequence[float], addresses: Sequence[Sequence[str]] = (), trunk: float | None = None
) -> ClusterSpec:
    """Nodes with an interface to each of two switches.

    Args:
        first, second: [nodes] bytes/s of the links of each node's interfaces.
        addresses: [nodes, 2] addresses of the interfaces.
        trunk: bytes/s of a link between the switches.
    """
    nodes, links = [], []
    for place, rates in enumerate(zip(first, second, strict=True)):
        interfaces = [{"name": f"eth{number}", "links": [f"s{number}"]} for number in range(2)]
        for interface, address in zip(interfaces, addresses[place] if addresses else (), strict=False):
            interface["address"] = address
        nodes.append({"name": f"n{place}", "interfaces": interfaces})
        links += [{"a": f"n{place}", "b": f"s{number}", "bandwidth": rate} for number, rate in enumerate(rates)]
    if trunk is not None:
        links.append({"a": "s0", "b": "s1", "bandwidth": trunk})
    fields = {"name": "two_interfaces", "nodes": nodes, "switches": ["s0", "s1"], "links": links}
    return ClusterSpec.from_dict({"format": ClusterSpec.FORMAT, **fields})
