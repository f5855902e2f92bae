"""From a survey to a `ClusterSpec`: the links that explain the measurements."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from scipy.optimize import nnls

from lightning_autosync.cluster import ClusterSpec, LinkGraph
from lightning_autosync.cluster.packing import EXACT_RANKS
from lightning_autosync.measure.probe.common_rates import with_common_rates
from lightning_autosync.measure.probe.survey import Flow, Survey

DIGITS = 4
"""Significant digits of a measured rate or time."""
_SWITCH = re.compile(r"switch|core|rack\d+")
"""Names of switches."""


@dataclass(frozen=True)
class Hosts:
    """What the ranks report about their hosts.

    Attributes:
        ranks: ranks of each node, sorted by first rank.
        names: name of each node.
        addresses: address of each node; None where others could not use them.
        local_bandwidth: bytes/s between two ranks of one node; None if no node has two ranks.
        local_latency: one-way seconds between two ranks of one node.
    """

    ranks: Sequence[Sequence[int]]
    names: Sequence[str]
    addresses: Sequence[str] | None = None
    local_bandwidth: float | None = None
    local_latency: float = 0.0


def make_cluster(name: str, hosts: Hosts, survey: Survey | None, latencies: Mapping[Flow, float]) -> ClusterSpec:
    """The cluster that explains a survey. Among many ranks, rates that differ by little get a common value.

    Args:
        survey: the measured rates; None for a single node. If there are several, they are then on one switch, and the
            rates of their links are unknown.
        latencies: one-way seconds between pairs of nodes.
    """
    data: dict[str, Any] = {
        "format": ClusterSpec.FORMAT,
        "name": name,
        "nodes": [_node(hosts, node) for node in range(len(hosts.ranks))],
        "rank_order": _rank_order(hosts),
    }
    if hosts.local_bandwidth is not None:
        data["local_bandwidth"] = _round(hosts.local_bandwidth)
        data["local_latency"] = _round(hosts.local_latency / 2)
    if survey is not None:
        switches, links = _links(survey, hosts.names)
        data |= {"switches": switches, "links": links}
        _set_latencies(data, hosts, latencies)  # which refuses rates that no link has
        if sum(map(len, hosts.ranks)) > EXACT_RANKS:
            rates = with_common_rates([(link["bandwidth"], link["reverse_bandwidth"]) for link in links])
            for link, (up, down) in zip(links, rates, strict=True):
                link |= {"bandwidth": _round(up), "reverse_bandwidth": _round(down)}
    elif len(hosts.ranks) > 1:
        data |= {"switches": ["switch"], "links": [{"a": host, "b": "switch"} for host in hosts.names]}
    return ClusterSpec.from_dict(data, source="probe")


def node_names(hosts: Sequence[str]) -> Sequence[str]:
    """Names for nodes: those of their hosts if these are distinct, and no switch could have one of them."""
    distinct = len(set(hosts)) == len(hosts) and not any(_SWITCH.fullmatch(host) for host in hosts)
    return hosts if distinct else [f"node{node}" for node in range(len(hosts))]


def _node(hosts: Hosts, node: int) -> dict[str, Any]:
    data: dict[str, Any] = {"name": hosts.names[node], "devices": len(hosts.ranks[node])}
    return data if hosts.addresses is None else {**data, "address": hosts.addresses[node]}


def _rank_order(hosts: Hosts) -> list[str] | None:
    node_of = {rank: node for node, ranks in enumerate(hosts.ranks) for rank in ranks}
    order = [node_of[rank] for rank in sorted(node_of)]
    return None if order == sorted(order) else [hosts.names[node] for node in order]


def _links(survey: Survey, names: Sequence[str]) -> tuple[list[str], list[dict[str, Any]]]:
    """Switches and links."""
    if survey.mesh:
        alone = survey.alone
        return [], [_link(names[i], names[j], alone[i, j], alone[j, i]) for i, j in survey.mesh]
    groups = list(survey.trunks)
    switches = [f"rack{number}" for number in range(len(groups))]
    # With a single up-link, the other nodes form a rack as well, and the two racks are linked directly.
    core = {0: "switch", 1: "rack1"}.get(len(groups), "core")
    links = [_link(rack, core, *survey.trunks[group]) for rack, group in zip(switches, groups, strict=True)]
    switch_of = {node: rack for rack, group in zip(switches, groups, strict=True) for node in group}
    access = []
    for node, name in enumerate(names):
        up, down = survey.up[node], survey.down[node]
        if node in survey.paces:
            # The other nodes together cannot fill this link, so its rates were only bounded from below. The port's own
            # pace gives the rate up, and most links are equally fast in both directions.
            up = max(up, survey.paces[node])
            down = max(down, up) if _never_drained(survey, node) else down
        access.append(_link(name, switch_of.get(node, core), up, down))
    return [*switches, core], access + links


def _never_drained(survey: Survey, node: int) -> bool:
    """Whether a node receives as much as all others together can send."""
    others = sum(rate for other, rate in enumerate(survey.up) if other != node)
    return survey.down[node] > 0.9 * others


def _link(a: str, b: str, up: float, down: float) -> dict[str, Any]:
    return {"a": a, "b": b, "bandwidth": _round(up), "reverse_bandwidth": _round(down)}


def _set_latencies(data: dict[str, Any], hosts: Hosts, latencies: Mapping[Flow, float]) -> None:
    """Set the links' latencies that best explain those of the routes: non-negative least squares."""
    spec = ClusterSpec.from_dict(data, source="probe")
    topology = LinkGraph(spec)
    crosses = numpy.zeros((len(latencies), len(spec.links)))
    for row, (i, j) in enumerate(latencies):
        for channel in topology.route(hosts.ranks[i][0], hosts.ranks[j][0]):
            if channel < 2 * len(spec.links):
                crosses[row, channel // 2] += 1
    found, _ = nnls(crosses, numpy.array(list(latencies.values())))
    for link, latency in zip(data["links"], found, strict=True):
        link["latency"] = _round(float(latency))


def _round(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
