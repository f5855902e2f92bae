"""Hypothesis strategies for clusters."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from lightning_autosync.cluster import ClusterSpec

RATES = st.floats(min_value=1e6, max_value=1e9)


@st.composite
def random_clusters(draw: st.DrawFn, max_ranks: int = 6, symmetric: bool = False) -> ClusterSpec:
    """A random tree of switches with nodes on it, some extra links, and ranks in any order."""
    switches = [f"s{index}" for index in range(draw(st.integers(1, 3)))]
    links: dict[frozenset[str], dict[str, Any]] = {}

    def connect(a: str, b: str) -> None:
        link = {"a": a, "b": b, "bandwidth": draw(RATES), "latency": draw(st.sampled_from([0, 1e-5, 1e-3]))}
        if not symmetric:
            link["reverse_bandwidth"] = draw(RATES)
        links.setdefault(frozenset((a, b)), link)

    for index, switch in enumerate(switches[1:]):
        connect(switch, switches[draw(st.integers(0, index))])
    nodes: list[dict[str, Any]] = []
    left = draw(st.integers(1, max_ranks))
    while left:
        devices = draw(st.integers(1, left))
        nodes.append({"name": f"n{len(nodes)}", "devices": devices})
        left -= devices
        connect(nodes[-1]["name"], draw(st.sampled_from(switches)))
    places = [node["name"] for node in nodes] + switches
    for _ in range(draw(st.integers(0, 2))):
        a, b = draw(st.permutations(places))[:2]
        connect(a, b)
    order = [node["name"] for node in nodes for _ in range(node["devices"])]
    return ClusterSpec.from_dict(
        {
            "format": ClusterSpec.FORMAT,
            "name": "random",
            "nodes": nodes,
            "switches": switches,
            "links": list(links.values()),
            "local_bandwidth": draw(RATES),
            "rank_order": draw(st.permutations(order)),
        }
    )
