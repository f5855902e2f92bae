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


@st.composite
def alike_clusters(draw: st.DrawFn, max_ranks: int = 10) -> ClusterSpec:
    """A random tree of switches with groups of equal nodes on them, 2 ranks at least, and ranks in any order."""
    rates = st.sampled_from([1e7, 2e7, 5e7, 3e8])
    switches = [f"s{index}" for index in range(draw(st.integers(1, 3)))]
    asymmetric = draw(st.booleans())

    def link(a: str, b: str) -> dict[str, Any]:
        rate = draw(rates)
        return {"a": a, "b": b, "bandwidth": rate, "reverse_bandwidth": draw(rates) if asymmetric else rate}

    links = [link(one, switches[draw(st.integers(0, index))]) for index, one in enumerate(switches[1:])]
    nodes: list[dict[str, Any]] = []
    left = draw(st.integers(2, max_ranks))
    while left:
        devices = draw(st.integers(1, min(3, left)))
        count = draw(st.integers(1, left // devices))
        model = link("", draw(st.sampled_from(switches)))
        for _ in range(count):
            nodes.append({"name": f"n{len(nodes)}", "devices": devices})
            links.append({**model, "a": nodes[-1]["name"]})
        left -= devices * count
    order = [node["name"] for node in nodes for _ in range(node["devices"])]
    return ClusterSpec.from_dict(
        {
            "format": ClusterSpec.FORMAT,
            "name": "alike",
            "nodes": nodes,
            "switches": switches,
            "links": links,
            "local_bandwidth": draw(rates),
            "rank_order": draw(st.permutations(order)),
        }
    )
