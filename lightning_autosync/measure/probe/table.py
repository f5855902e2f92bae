"""The tables that a probe prints."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.measure.emulation.check import ALLOWED_DEVIATION, MEGABIT
from lightning_autosync.measure.probe.deviation import settings_of


def nodes_table(answer: dict[str, Any], cluster: ClusterSpec) -> Table:
    """One row a node: ranks, and what it sends and receives, alone and while everybody sends."""
    table = Table(title=f"{cluster.name}: nodes", caption="Mbit/s on the wire, framing included")
    table.add_column("node")
    for heading in ("ranks", "sends", "loaded", "receives", "loaded"):
        table.add_column(heading, justify="right")
    for index, found in enumerate(answer["nodes"]):
        ranks = " ".join(map(str, cluster.ranks_of(index)))
        rates = [_rate(found.get(key)) for key in ("up", "up_loaded", "down", "down_loaded")]
        table.add_row(found["name"], ranks, *rates)
    return table


def pairs_table(answer: dict[str, Any]) -> Table:
    """One row for each way between two nodes that was measured alone: rates and round trips, idle and loaded."""
    caption = "Mbit/s alone, and while everybody sends; median ms there and back, idle, and while the way there is full"
    table = Table(title="pairs of nodes", caption=caption)
    for heading in ("from", "to"):
        table.add_column(heading)
    for heading in ("Mbit/s", "loaded", "round trip ms", "loaded"):
        table.add_column(heading, justify="right")
    names = [node["name"] for node in answer["nodes"]]
    for pair in answer["pairs"]:
        for way, nodes in enumerate((pair["nodes"], pair["nodes"][::-1])):
            alone, trip = pair["alone"][way], pair["round_trip_loaded"][way]
            if alone is not None:
                times = [f"{1e3 * each['median']:.2f}" for each in (pair["round_trip"], trip)]
                table.add_row(*(names[node] for node in nodes), _rate(alone), _rate(pair["loaded"][way]), *times)
    return table


def links_table(cluster: ClusterSpec, truth: ClusterSpec | None) -> Table:
    """One row for each direction of a link; those far from what they are set to stand out."""
    table = Table(title=f"{cluster.name}: links", caption="latencies are halves of idle round trips")
    for heading in ("from", "to"):
        table.add_column(heading)
    for heading in ("Mbit/s", "latency us", *(("setting", "deviation") if truth else ())):
        table.add_column(heading, justify="right")
    for row in link_rows(cluster, truth):
        cells = [row["from"], row["to"], _rate(row["rate"]), f"{row['latency'] * 1e6:.0f}"]
        off = row.get("deviation")
        if truth is not None:
            cells += [_rate(row["setting"]), "not set" if off is None else f"{off:+.1%}"]
        wrong = truth is not None and (off is None or abs(off) > ALLOWED_DEVIATION)
        table.add_row(*cells, style="bold red" if wrong else None)
    return table


def link_rows(cluster: ClusterSpec, truth: ClusterSpec | None) -> list[dict[str, Any]]:
    """Each direction of a link as plain data: from, to, rate, latency; with a ``truth`` setting and deviation too.

    Setting and deviation are None where no link of the truth is like it.
    """
    rows: list[dict[str, Any]] = []
    settings = settings_of(cluster, truth) if truth is not None else []
    for number, link in enumerate(cluster.links):
        ways = (link.a, link.b, link.bandwidth), (link.b, link.a, link.reverse_bandwidth)
        for way, (source, target, rate) in enumerate(ways):
            assert rate is not None
            row = {"from": source, "to": target, "rate": rate, "latency": link.latency}
            if truth is not None:
                setting = settings[number][way]
                row |= {"setting": setting, "deviation": None if setting is None else rate / setting - 1}
            rows.append(row)
    return rows


def _rate(rate: float | None) -> str:
    return "" if rate is None else f"{rate / MEGABIT:.1f}"
