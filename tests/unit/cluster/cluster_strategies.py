"""Hypothesis strategies for clusters."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
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
    """A random tree of switches with groups of nodes on them, 2 ranks at least, and ranks in any order.

    Nodes of a group are equal except for the latencies of their links.
    """
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
            links.append({**model, "a": nodes[-1]["name"], "latency": draw(st.sampled_from([0, 1e-5, 1e-3]))})
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


def cluster_of(nodes: Iterable[dict[str, Any]], switches: list[str], links: list[dict[str, Any]]) -> ClusterSpec:
    """The cluster with these fields."""
    fields = {"nodes": list(nodes), "switches": switches, "links": links}
    return ClusterSpec.from_dict({"format": ClusterSpec.FORMAT, "name": "fabric", **fields})


def leaves_and_spines(leaves: int, spines: int, nodes_per_leaf: int, uplink: float = 1e6) -> ClusterSpec:
    """Nodes of 1 MB/s on leaf switches, each of which has an uplink to every spine."""
    names = [f"n{index}" for index in range(leaves * nodes_per_leaf)]
    links: list[dict[str, Any]] = [
        {"a": name, "b": f"leaf{index // nodes_per_leaf}", "bandwidth": 1e6} for index, name in enumerate(names)
    ]
    pairs = product(range(leaves), range(spines))
    links += [{"a": f"leaf{leaf}", "b": f"spine{spine}", "bandwidth": uplink} for leaf, spine in pairs]
    switches = [f"leaf{leaf}" for leaf in range(leaves)] + [f"spine{spine}" for spine in range(spines)]
    return cluster_of(({"name": name} for name in names), switches, links)


def two_links_a_node(nodes: int) -> ClusterSpec:
    """Nodes with a link of 1 MB/s to each of two switches, which are not linked."""
    pairs = product(range(nodes), range(2))
    links = [{"a": f"n{node}", "b": f"s{switch}", "bandwidth": 1e6} for node, switch in pairs]
    return cluster_of(({"name": f"n{index}"} for index in range(nodes)), ["s0", "s1"], links)


@st.composite
def fabrics(draw: st.DrawFn, max_ranks: int = 6, symmetric: bool = False) -> ClusterSpec:
    """Leaves and spines with several routes between leaves, and nodes of which some have links to two leaves."""
    leaves, spines = draw(st.integers(2, 3)), draw(st.integers(2, 3))
    links: list[dict[str, Any]] = []

    def connect(a: str, b: str) -> None:
        rate = draw(RATES)
        links.append({"a": a, "b": b, "bandwidth": rate, "reverse_bandwidth": rate if symmetric else draw(RATES)})

    for leaf, spine in product(range(leaves), range(spines)):
        connect(f"leaf{leaf}", f"spine{spine}")
    nodes: list[dict[str, Any]] = []
    left = draw(st.integers(2, max_ranks))
    while left:
        nodes.append({"name": f"n{len(nodes)}", "devices": draw(st.integers(1, min(left, 2)))})
        left -= nodes[-1]["devices"]
        for leaf in draw(st.permutations(range(leaves)))[: draw(st.integers(1, 2))]:
            connect(nodes[-1]["name"], f"leaf{leaf}")
    switches = [f"leaf{leaf}" for leaf in range(leaves)] + [f"spine{spine}" for spine in range(spines)]
    return cluster_of(nodes, switches, links)
