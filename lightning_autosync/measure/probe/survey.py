"""The measurements from which the shape and the rates of a network are told.

Their number grows with the nodes, not with their pairs: one node to all others fills its up-link, all to one its
down-link, and everybody to everybody shows who shares more than these two. Sums over full links are exact however
unfairly TCP divides them, so every rate of a link is such a sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import networkx
import numpy
from numpy.typing import NDArray
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform

from lightning_autosync.cluster import ClusterSpec, LinkGraph

Flow = tuple[int, int]
"""Source and target: indices of nodes."""
_FULL = 1 - 1e-9
_NEARLY = 0.99


def fair_rates(routes: Sequence[Sequence[int]], capacities: Sequence[float]) -> list[float]:
    """Bytes/s of each route, the channels of which carry ``capacities`` bytes/s."""
    crosses = numpy.zeros((len(routes), len(capacities)))
    for flow, route in enumerate(routes):
        crosses[flow, list(route)] = 1
    rates = numpy.zeros(len(routes))
    growing = numpy.ones(len(routes), dtype=bool)
    residual = numpy.array(capacities, dtype=float)
    while growing.any():
        load = crosses[growing].sum(axis=0)
        paces = numpy.divide(residual, load, out=numpy.full_like(residual, numpy.inf), where=load > 0)
        pace = float(paces.min(initial=numpy.inf))
        rates[growing] += pace
        residual -= pace * load
        full = (paces <= pace / _FULL) & (load > 0)
        growing &= ~(crosses[:, full] > 0).any(axis=1)
    return [float(rate) for rate in rates]


class FairCluster:
    """Fair rates between the nodes of a cluster (not its ranks)."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self._topology = LinkGraph(cluster)
        self._ranks = [cluster.ranks_of(node)[0] for node in range(len(cluster.nodes))]
        self._links = 2 * len(cluster.links)
        self._capacities = self._topology.capacities.tolist()

    def route(self, flow: Flow) -> list[int]:
        """The channels of links that a flow takes; those within nodes are left out."""
        channels = self._topology.route(self._ranks[flow[0]], self._ranks[flow[1]])
        return [channel for channel in channels if channel < self._links]

    def rates(self, flows: Sequence[Flow]) -> list[float]:
        """Bytes/s of flows that run at the same time."""
        return fair_rates([self.route(flow) for flow in flows], self._capacities)

    def full(self, flows: Sequence[Flow], rates: Sequence[float]) -> tuple[float, float]:
        """What ``rates`` make of links that several flows share and could fill.

        Returns:
            The share of such a link that is used, the mean over links; and how many of them are on a flow's way, the
            mean over flows.
        """
        routes = [self.route(flow) for flow in flows]
        capacities = numpy.array(self._capacities)
        could, used, count = (numpy.zeros(len(capacities)) for _ in range(3))
        for route, fair, rate in zip(routes, self.rates(flows), rates, strict=True):
            could[route] += fair
            used[route] += rate
            count[route] += 1
        shared = (could > _NEARLY * capacities) & (count > 1)
        crowding = float(numpy.mean([shared[route].sum() for route in routes]))
        return (float((used / capacities)[shared].mean()) if shared.any() else 1.0), crowding


LEAST_STEP = 0.05
"""Of the logarithm of rates, between the merge that makes a group and the one that takes it up."""


def candidate_groups(contrast: NDArray[numpy.float64]) -> Iterator[tuple[int, ...]]:
    """Groups of nodes worth a test, parts before the whole; by average linkage.

    Args:
        contrast: [nodes, nodes] what each pair got while everybody sent to everybody, relative to what it would get
            on one switch. Pairs behind a common bottleneck get less, and leave more to the others.
    """
    nodes = len(contrast)
    if nodes < 4:
        return
    logarithm = numpy.log(numpy.maximum(contrast, 1e-3))
    nearness = (logarithm + logarithm.T) / 2
    numpy.fill_diagonal(nearness, 0.0)
    distance = nearness[~numpy.eye(nodes, dtype=bool)].max() - nearness
    numpy.fill_diagonal(distance, 0.0)
    tree = linkage(squareform(distance, checks=False), method="average")
    taken_up = {int(part): row[2] for row in tree for part in row[:2]}
    members: dict[int, tuple[int, ...]] = {node: (node,) for node in range(nodes)}
    for merge, (one, other, height, size) in enumerate(tree, start=nodes):
        members[merge] = tuple(sorted(members[int(one)] + members[int(other)]))
        if size <= nodes - 2 and taken_up[merge] - height > LEAST_STEP:
            yield members[merge]


Floats = NDArray[numpy.float64]

TRUNK = 0.85
"""A group sends less than this share of what its nodes could: it has an up-link of its own."""
ALONE = 0.75
"""One flow gets less than this share of what two nodes can send and receive: there is no switch between them."""
SLOWED = 0.85
"""A flow gets less than this share of its rate when alone: another one is in its way."""
FULL_WINDOWS = 3.0
"""Windows for which everybody sends to everybody, as many flows take longer to find their pace."""

DECISIVE_WINDOWS = 2.0
"""Windows of the measurements on which a surprising finding depends, and how many there are of them at most."""
DECISIVE_TRIES = 2
UNLIKE = 0.95
"""Most links are equal both ways: a node that sends less than this share of what it receives is measured again."""


class Rates(Protocol):
    """Something that measures flows between nodes that run at the same time, in bytes/s."""

    def rates(self, flows: Sequence[Flow], factor: float = 1.0) -> list[float]: ...

    def pace(self, node: int) -> float:
        """Bytes/s at which the node's own port sends, whatever its peers can take."""
        ...


@dataclass
class Survey:
    """What was measured, in bytes/s on the wire.

    Attributes:
        up, down: [nodes] sums with all others.
        full: [nodes, nodes] everybody to everybody.
        alone: flows that had the network to themselves.
        trunks: for each group of nodes with an up-link of its own, its rates up and down.
        mesh: direct links, if nodes are cabled without a switch.
        paces: of nodes that the others together could not fill.
    """

    up: list[float]
    down: list[float]
    full: Floats
    alone: dict[Flow, float] = field(default_factory=dict)
    trunks: dict[tuple[int, ...], tuple[float, float]] = field(default_factory=dict)
    mesh: list[Flow] = field(default_factory=list)
    paces: dict[int, float] = field(default_factory=dict)

    @property
    def nodes(self) -> int:
        return len(self.up)


def take_survey(meter: Rates, nodes: int, every_pair: bool) -> Survey:
    """Measure; ``every_pair`` alone too, not only from each node to one other."""
    flows = [(i, j) for i in range(nodes) for j in range(nodes) if i != j]
    full = numpy.full((nodes, nodes), numpy.nan)
    for (i, j), rate in zip(flows, meter.rates(flows, FULL_WINDOWS), strict=True):
        full[i, j] = rate
    survey = Survey(*_fans(meter, full, flows), full)
    contrast = full / _matrix_of_expected(survey, flows)
    nearest = [(node, int(numpy.nanargmax(contrast[node]))) for node in range(nodes)]
    for flow in flows if every_pair else nearest:
        survey.alone[flow] = meter.rates([flow])[0]
    if nodes > 2 and _no_switch(survey, nearest):
        for i, j in nearest:
            expected = ALONE * min(survey.up[i], survey.down[j])
            survey.alone[i, j] = _most(meter, [(i, j)], survey.alone[i, j], expected)
    if nodes > 2 and _no_switch(survey, nearest):
        survey.alone |= {flow: meter.rates([flow])[0] for flow in flows if flow not in survey.alone}
        survey.mesh = _direct_links(meter, survey)
        return survey
    for group in candidate_groups(contrast):
        _test_trunk(meter, survey, group)
    survey.paces = {node: meter.pace(node) for node in range(nodes) if _never_filled(survey, node)}
    return survey


def _fans(meter: Rates, full: Floats, flows: Sequence[Flow]) -> tuple[list[float], list[float]]:
    """What each node sends to all others and receives from them; again where the two differ, or one of
    them is less than while everybody sends."""
    up, down = [], []
    for node in range(len(full)):
        out, back = [flow for flow in flows if flow[0] == node], [flow for flow in flows if flow[1] == node]
        sent, received = sum(meter.rates(out)), sum(meter.rates(back))
        up.append(_most(meter, out, sent, UNLIKE * max(received, numpy.nansum(full[node]))))
        down.append(_most(meter, back, received, UNLIKE * max(sent, numpy.nansum(full[:, node]))))
    return up, down


def _most(meter: Rates, flows: Sequence[Flow], found: float, expected: float) -> float:
    """What flows carry in sum, found so far; if it is less than expected, the most of some longer measurements too.

    It may have been a disturbance, which can only make flows slower.
    """
    for _ in range(DECISIVE_TRIES):
        if found >= expected:
            break
        found = max(found, sum(meter.rates(flows, DECISIVE_WINDOWS)))
    return found


def _matrix_of_expected(survey: Survey, flows: Sequence[Flow]) -> Floats:
    """[nodes, nodes] what everybody would send to everybody on one switch, as no up-link is known yet."""
    rates = numpy.ones_like(survey.full)
    for (i, j), rate in zip(flows, expected_rates(survey, flows), strict=True):
        rates[i, j] = rate
    return rates


def expected_rates(survey: Survey, flows: Sequence[Flow]) -> list[float]:
    """Bytes/s of flows if nothing but the nodes' own links and the known up-links were in their way."""
    nodes = survey.nodes
    capacities = [*survey.up, *survey.down, *(rate for trunk in survey.trunks.values() for rate in trunk)]
    routes = []
    for i, j in flows:
        route = [i, nodes + j]
        for number, group in enumerate(survey.trunks):
            if (i in group) != (j in group):
                route.append(2 * (nodes + number) + (j in group))
        routes.append(route)
    return fair_rates(routes, capacities)


def _no_switch(survey: Survey, nearest: Sequence[Flow]) -> bool:
    """Most nodes send more to several others than to that one alone to which the way is shared the least."""
    short = [survey.alone[i, j] < ALONE * min(survey.up[i], survey.down[j]) for i, j in nearest]
    return sum(short) > survey.nodes / 2


def _direct_links(meter: Rates, survey: Survey) -> list[Flow]:
    """The pairs whose flows no third node passes on; the likeliest others too, until all nodes are linked."""
    pairs = [(i, j) for i in range(survey.nodes) for j in range(i + 1, survey.nodes)]
    scores = {pair: _directness(meter, survey, pair) for pair in pairs}
    graph = networkx.Graph()
    graph.add_nodes_from(range(survey.nodes))
    for pair in sorted(pairs, key=lambda pair: -scores[pair]):
        if scores[pair] >= SLOWED or not networkx.has_path(graph, *pair):
            graph.add_edge(*pair)
    return sorted((min(edge), max(edge)) for edge in graph.edges)


def _directness(meter: Rates, survey: Survey, pair: Flow) -> float:
    """What share of its rate the faster of two legs over a third node keeps beside the pair's flow, at least.

    Where the third node passes on what the pair sends, the flow is in the way of both legs.
    """
    i, j = pair
    kept = [1.0]
    for k in range(survey.nodes):
        if k not in pair:
            legs = [(i, k), (k, j)]
            rates = meter.rates([pair, *legs])[1:]
            kept.append(max(rate / survey.alone[leg] for rate, leg in zip(rates, legs, strict=True)))
    return min(kept)


def _test_trunk(meter: Rates, survey: Survey, group: tuple[int, ...]) -> None:
    """Keep the group's rates up and down if it sends or receives less than what is known so far lets it.

    Several racks together send what their up-links let them, which is known when they are tested; a rack sends less
    than a part of it that was taken for one and the rest of its nodes, and takes that part's place.
    """
    others = tuple(node for node in range(survey.nodes) if node not in group)
    flows = _pairing(group, others)
    back = [(j, i) for i, j in flows]
    enough, enough_back = (TRUNK * sum(expected_rates(survey, some)) for some in (flows, back))
    up = _most(meter, flows, sum(meter.rates(flows)), enough)
    down = _most(meter, back, sum(meter.rates(back)), enough_back)
    if up < enough or down < enough_back:
        kept = {other: rates for other, rates in survey.trunks.items() if not set(other) <= set(group)}
        survey.trunks = {**kept, group: (up, down)}


def _pairing(group: Sequence[int], others: Sequence[int]) -> list[Flow]:
    """Every node of either side at least once."""
    return [(group[k % len(group)], others[k % len(others)]) for k in range(max(len(group), len(others)))]


def _never_filled(survey: Survey, node: int) -> bool:
    """Whether all others together receive as much as the node sends: its own link may carry more."""
    others = sum(rate for other, rate in enumerate(survey.down) if other != node)
    return survey.up[node] > TRUNK * others
