"""The tables that a probe prints. Settings of emulated links stand beside the measured rates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import networkx
from rich.table import Table

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.measure.emulation.check import ALLOWED_DEVIATION, MEGABIT
from lightning_autosync.measure.figures import numbers_table

Cut = tuple[frozenset[int], frozenset[int]]
"""Ranks on the sending and on the receiving side of one direction of a link."""


def settings_of(found: ClusterSpec, truth: ClusterSpec) -> list[tuple[float | None, float | None]]:
    """For each link found, the rates that were set in each direction; None where no such link was set.

    Links are the same if they separate the same ranks. Links in a row without ranks between them cannot be told apart
    by measurements, so they count as one link of the least rate. Links that separate nothing, as in a ring, are
    identified by their ends.
    """
    rates: dict[Cut, float] = {}
    for cut, rate in _cuts(truth):
        rates[cut] = min(rate, rates.get(cut, rate))
    of_links = [rates.get(cut) for cut, _ in _cuts(found)]
    return list(zip(of_links[::2], of_links[1::2], strict=True))


def _cuts(cluster: ClusterSpec) -> Iterator[tuple[Cut, float]]:
    """For each link and direction its cut and its rate; of the nodes' first interfaces, since a probe uses no other."""
    links = [link for link in cluster.links if cluster.carries(0, link)]
    graph = networkx.Graph([(link.a, link.b) for link in links])
    bridges = {frozenset(bridge) for bridge in networkx.bridges(graph)}
    ranks = {node.name: frozenset(cluster.ranks_of(index)) for index, node in enumerate(cluster.nodes)}
    for link in links:
        near, far = {link.a}, {link.b}
        if frozenset((link.a, link.b)) in bridges:
            graph.remove_edge(link.a, link.b)
            near, far = (
                networkx.node_connected_component(graph, link.a),
                networkx.node_connected_component(graph, link.b),
            )
            graph.add_edge(link.a, link.b)
        one, other = _members(near, ranks), _members(far, ranks)
        for cut, (_, _, rate) in zip(((one, other), (other, one)), link.directions, strict=True):
            yield cut, rate


def _members(places: set[str], ranks: dict[str, frozenset[int]]) -> frozenset[int]:
    return frozenset(rank for place in places for rank in ranks.get(place, ()))


def nodes_table(answer: dict[str, Any], cluster: ClusterSpec) -> Table:
    """One row per node: ranks, and rates sent and received, alone and while all nodes send."""
    headings = ("ranks", "sends", "loaded", "receives", "loaded")
    caption = "Mbit/s on the wire, framing included"
    table = numbers_table(f"{cluster.name}: nodes", ("node",), headings, caption, wrap=True)
    for index, found in enumerate(answer["nodes"]):
        ranks = " ".join(map(str, cluster.ranks_of(index)))
        rates = [_rate(found.get(key)) for key in ("up", "up_loaded", "down", "down_loaded")]
        table.add_row(found["name"], ranks, *rates)
    return table


def pairs_table(answer: dict[str, Any]) -> Table:
    """One row per direction between two nodes that was measured alone: rates and round trips, idle and loaded."""
    caption = "Mbit/s alone, and while everybody sends; median ms there and back, idle, and while the way there is full"
    headings = ("Mbit/s", "loaded", "round trip ms", "loaded")
    table = numbers_table("pairs of nodes", ("from", "to"), headings, caption, wrap=True)
    names = [node["name"] for node in answer["nodes"]]
    for pair in answer["pairs"]:
        for way, nodes in enumerate((pair["nodes"], pair["nodes"][::-1])):
            alone, trip = pair["alone"][way], pair["round_trip_loaded"][way]
            if alone is not None:
                times = [f"{1e3 * each['median']:.2f}" for each in (pair["round_trip"], trip)]
                table.add_row(*(names[node] for node in nodes), _rate(alone), _rate(pair["loaded"][way]), *times)
    return table


def links_table(cluster: ClusterSpec, truth: ClusterSpec | None) -> Table:
    """One row per direction of a link; directions that are far from their settings stand out."""
    headings = ("Mbit/s", "latency us", *(("setting", "deviation") if truth else ()))
    caption = "latencies are halves of idle round trips"
    table = numbers_table(f"{cluster.name}: links", ("from", "to"), headings, caption, wrap=True)
    for row in link_rows(cluster, truth):
        cells = [row["from"], row["to"], _rate(row["rate"]), f"{row['latency'] * 1e6:.0f}"]
        off = row.get("deviation")
        if truth is not None:
            cells += [_rate(row["setting"]), "not set" if off is None else f"{off:+.1%}"]
        wrong = truth is not None and (off is None or abs(off) > ALLOWED_DEVIATION)
        table.add_row(*cells, style="bold red" if wrong else None)
    return table


def link_rows(cluster: ClusterSpec, truth: ClusterSpec | None) -> list[dict[str, Any]]:
    """Each direction of a link as plain data: from, to, rate, latency; with ``truth`` also setting and deviation.

    Setting and deviation are None where ``truth`` has no such link.
    """
    rows: list[dict[str, Any]] = []
    settings = settings_of(cluster, truth) if truth is not None else []
    for number, link in enumerate(cluster.links):
        for way, (source, target, rate) in enumerate(link.directions):
            row = {"from": source, "to": target, "rate": rate, "latency": link.latency}
            if truth is not None:
                setting = settings[number][way]
                row |= {"setting": setting, "deviation": None if setting is None else rate / setting - 1}
            rows.append(row)
    return rows


def _rate(rate: float | None) -> str:
    return "" if rate is None else f"{rate / MEGABIT:.1f}"
