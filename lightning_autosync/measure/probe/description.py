"""Whether the description of a cluster fits what a job found, and how to correct it.

Links need not be the same. What counts is the rate at which each node sends to all others and receives from them, and
each rack too. A link that the other nodes cannot fill is never too slow in this comparison. Neither is one that carries
as much as one process can surely send.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.measure.probe.survey import FairCluster, Flow, everybody, pairing

FAR = 0.25
"""Relative difference between a described and a measured rate from which on it is told."""
FAR_AT_START = 0.3
"""The same for the single short measurement at the start of a job."""
_MEASURABLE = 1.25e9
"""Bytes/s that one process can surely send and receive. A node that carries so much is not called slow."""
_LIMITS = 0.99
"""Share of a link's rate from which on the link counts as what limits its node."""


def check_places(described: ClusterSpec, seen: ClusterSpec) -> list[str]:
    """Sentences on ranks that run on other nodes than a description says; ``seen`` is the cluster of a `JobSurvey`."""
    if described.world_size != seen.world_size:
        return [f"The description has {described.world_size} ranks, but the job has {seen.world_size}."]
    return [*_split_nodes(described, seen), *_joined_nodes(described, seen)]


def check_rates(described: ClusterSpec, seen: ClusterSpec, earlier: str) -> list[str]:
    """Sentences on rates that differ from a description of the same nodes; none unless both clusters have rates.

    ``earlier`` is what a rate of ``described`` is, in sentences: "..., but 1 Gbit/s by the description."
    """
    if not (described.measured and seen.measured):
        return []
    return [
        f"{traffic.words} {_rate(found)}, but {_rate(expected)} {earlier}."
        for traffic, expected, found in _differences(described, _in_order_of(described, seen))
    ]


def _differences(described: ClusterSpec, seen: ClusterSpec) -> Iterator[tuple[_Traffic, float, float]]:
    """Traffic whose rates differ, with the described and the seen bytes/s; nodes are in the same order."""
    one, other = FairCluster(described), FairCluster(seen)
    for traffic in _traffic(described, seen):
        expected, found = (sum(cluster.rates(traffic.flows)) for cluster in (one, other))
        if _differs(expected, found, traffic.flows):
            yield traffic, expected, found


def with_seen_rates(described: ClusterSpec, seen: ClusterSpec) -> ClusterSpec:
    """A description whose nodes send and receive over their first interfaces as was seen.

    A survey sees only the first interface of each node. The node's links of that interface are scaled, and the links of
    its other interfaces stay as described. Links between switches are scaled alike by what that does not explain, such
    as a slower uplink of a rack.

    Args:
        described: the description, with rates.
        seen: the cluster of a `JobSurvey` with rates, on the same nodes.
    """
    flows, factors = everybody(len(described.nodes)), dict[tuple[str, bool], float]()
    rates = [FairCluster(cluster).rates(flows) for cluster in (described, _in_order_of(described, seen))]
    for node, spec in enumerate(described.nodes):
        for sends in (True, False):
            own = [number for number, flow in enumerate(flows) if flow[not sends] == node]
            expected, found = (sum(some[number] for number in own) for some in rates)
            differs = _differs(expected, found, [flows[number] for number in own])
            factors[spec.name, sends] = found / expected if differs else 1.0

    def of_nodes(sender: str, receiver: str) -> float:
        ends = (sender, True), (receiver, False)
        return min((factors[end] for end in ends if end in factors), default=1.0)  # the nodes among the ends

    corrected = _with_factors(described, of_nodes)
    ratios = [measured / expected for _, expected, measured in _differences(corrected, _in_order_of(described, seen))]
    if not ratios:
        return corrected
    largest, names = max(ratios, key=lambda ratio: abs(math.log(ratio))), {node.name for node in described.nodes}
    return _with_factors(corrected, lambda *ends: 1.0 if names & set(ends) else largest)


def _with_factors(cluster: ClusterSpec, factor: Callable[[str, str], float]) -> ClusterSpec:
    """The cluster with the links of first interfaces scaled; ``factor`` takes the names of a direction's two ends."""
    links = [link.model_dump() for link in cluster.links]
    for fields, link in zip(links, cluster.links, strict=True):
        directions = ("bandwidth", link.a, link.b), ("reverse_bandwidth", link.b, link.a)
        for field, sender, receiver in directions if cluster.carries(0, link) else ():
            rate = getattr(link, field)
            fields[field] = None if rate is None else rate * factor(sender, receiver)
    return ClusterSpec.from_dict({**cluster.to_dict(), "links": links}, source="survey")


def _differs(expected: float, found: float, flows: Sequence[Flow]) -> bool:
    """Whether the rates of simultaneous flows differ; in each node, one process sends or receives."""
    surely = _MEASURABLE * min(len({flow[end] for flow in flows}) for end in (0, 1))
    return not (1 - FAR) * min(expected, surely) <= found <= (1 + FAR) * expected


def far_rates(described: ClusterSpec, flows: Sequence[Flow], rates: Sequence[float]) -> dict[tuple[int, bool], str]:
    """Phrases on nodes whose measured rates are far from those that a description leads to.

    Args:
        described: the description, with rates.
        flows: flows between nodes that were measured at the same time.
        rates: by flow, bytes/s.

    Returns:
        By node, and whether it sends (or receives): the link, its described rate and its measured one.
    """
    fair, names = FairCluster(described), [node.name for node in described.nodes]
    expected = fair.rates(flows)
    found: dict[tuple[int, bool], str] = {}
    for node, name in enumerate(names):
        for sends in (True, False):
            own = [number for number, flow in enumerate(flows) if flow[not sends] == node]
            wanted, measured = (sum(some[number] for number in own) for some in (expected, rates))
            if not own or not _is_far(wanted, measured):
                continue
            link, limit = fair.end_of(flows[own[0]], sends)
            if len(names) == 2:
                link = f"{names[flows[own[0]][0]]} > {names[flows[own[0]][1]]}"
            elif wanted < _LIMITS * limit:
                link = f"{name} {'to' if sends else 'from'} {'all others' if len(own) > 1 else 'another node'}"
            found[node, sends] = _phrase(link, wanted, measured)
    return found


def far_links(described: ClusterSpec, flows: Sequence[Flow], rates: Sequence[float]) -> dict[str, str]:
    """Phrases, by link, on links that several nodes share and whose measured rates are far from the described ones.

    Args:
        described, flows, rates: as for `far_rates`. Only links that the flows would fill by the description count.
    """
    fair, found = FairCluster(described), dict[str, str]()
    expected = fair.rates(flows)
    for link, wanted, crossing in fair.filled(flows):
        measured = sum(rates[number] for number in crossing)
        # A node whose own link is slow makes shared ones look slow, but the other nodes then get more of these.
        if _is_far(wanted, measured) and _all_on_one_side(flows, crossing, expected, rates):
            found[link] = _phrase(link, wanted, measured)
    return found


def _all_on_one_side(
    flows: Sequence[Flow], crossing: Sequence[int], expected: Sequence[float], rates: Sequence[float]
) -> bool:
    """Whether all nodes whose flows cross a link get less over it than expected, or all of them get more."""
    less = set()
    for end in (0, 1):
        for node in {flows[number][end] for number in crossing}:
            own = [number for number in crossing if flows[number][end] == node]
            less.add(sum(rates[number] for number in own) < sum(expected[number] for number in own))
    return len(less) == 1


def _is_far(described: float, measured: float) -> bool:
    slow, fast = (1 - FAR_AT_START) * min(described, _MEASURABLE), (1 + FAR_AT_START) * described
    return not slow <= measured <= fast


def _phrase(link: str, described: float, measured: float) -> str:
    return f"{link}: described as {_rate(described)}, measured {_rate(measured)}"


@dataclass(frozen=True)
class _Traffic:
    """Simultaneous flows between nodes, and the sentence's beginning that says so."""

    words: str
    flows: Sequence[Flow]


def _traffic(described: ClusterSpec, seen: ClusterSpec) -> Iterator[_Traffic]:
    nodes = len(described.nodes)
    if nodes < 2:
        return
    flows = everybody(nodes)
    for node, name in enumerate(spec.name for spec in described.nodes):
        yield _Traffic(f"Node {name} sends to all others at", [flow for flow in flows if flow[0] == node])
        yield _Traffic(f"Node {name} receives from all others at", [flow for flow in flows if flow[1] == node])
    known = set[frozenset[Flow]]()
    for rack in dict.fromkeys([*_racks(described), *_racks(seen)]):
        flows = pairing(rack, [node for node in range(nodes) if node not in rack])
        names = ", ".join(described.nodes[node].name for node in rack)
        for verb, ways in (("send to", flows), ("receive from", [(j, i) for i, j in flows])):
            if frozenset(ways) not in known:
                known.add(frozenset(ways))
                yield _Traffic(f"Together, nodes {names} {verb} all others at", ways)


def _racks(cluster: ClusterSpec) -> Iterator[tuple[int, ...]]:
    """Groups of several nodes on one switch that leave several other nodes."""
    for grouping in cluster.hierarchy():
        for ranks in grouping:
            nodes = tuple(sorted({cluster.rank_nodes[rank] for rank in ranks}))
            if 2 <= len(nodes) <= len(cluster.nodes) - 2:
                yield nodes


def _split_nodes(described: ClusterSpec, seen: ClusterSpec) -> Iterator[str]:
    """Sentences on described nodes whose ranks run on several hosts."""
    for node, spec in enumerate(described.nodes):
        ranks = described.ranks_of(node)
        hosts = _names(seen, ranks)
        if len(hosts) > 1:
            yield f"Ranks {_listed(ranks)} are described on node {spec.name}, but run on {' and '.join(hosts)}."


def _joined_nodes(described: ClusterSpec, seen: ClusterSpec) -> Iterator[str]:
    """Sentences on hosts whose ranks are described on several nodes."""
    for host, spec in enumerate(seen.nodes):
        ranks = seen.ranks_of(host)
        nodes = _names(described, ranks)
        if len(nodes) > 1:
            yield f"Ranks {_listed(ranks)} run on host {spec.name}, but are described on {' and '.join(nodes)}."


def _names(cluster: ClusterSpec, ranks: Sequence[int]) -> list[str]:
    return list(dict.fromkeys(cluster.nodes[cluster.rank_nodes[rank]].name for rank in ranks))


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _in_order_of(described: ClusterSpec, seen: ClusterSpec) -> ClusterSpec:
    """The seen cluster with its nodes in the described order, so that both have the same indices."""
    nodes = [seen.nodes[seen.rank_nodes[described.ranks_of(node)[0]]] for node in range(len(described.nodes))]
    order = [seen.nodes[node].name for node in seen.rank_nodes]
    document = {**seen.to_dict(), "nodes": [node.model_dump() for node in nodes], "rank_order": order}
    return ClusterSpec.from_dict(document, source="survey")


def _rate(rate: float) -> str:
    return f"{rate * 8e-6:.4g} Mbit/s"
