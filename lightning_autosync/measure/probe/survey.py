"""The measurements that reveal the shape and the rates of a network.

Their number grows with the number of nodes, not of pairs. One node that sends to all others fills its up-link; all
others that send to one fill its down-link; all-to-all traffic shows which nodes share further links. TCP may divide a
full link unfairly between flows, but their sum is exact. So every rate of a link is such a sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from lightning_autosync.cluster import ClusterSpec, LinkGraph

Flow = tuple[int, int]
"""Source and target, as indices of nodes."""
_FULL = 1 - 1e-9
"""Tolerance in `fair_rates`, so that channels that fill up at the same time are found despite rounding."""
_NEARLY = 0.99
"""Share of its capacity from which on a channel counts as one that flows could fill."""


def fair_rates(routes: Sequence[Sequence[int]], capacities: Sequence[float]) -> list[float]:
    """Max-min fair rates of simultaneous flows by progressive filling, in bytes/s.

    Args:
        routes: by flow, the channels that it crosses.
        capacities: by channel, bytes/s.
    """
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
    """Fair rates of flows between the nodes (not the ranks) of a cluster."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self._topology = LinkGraph(cluster)
        self._ranks = [cluster.ranks_of(node)[0] for node in range(len(cluster.nodes))]
        self._links = 2 * len(cluster.links)
        self._capacities = self._topology.capacities.tolist()

    def route(self, flow: Flow) -> list[int]:
        """The channels of links that a flow takes, without those within nodes."""
        channels = self._topology.route(self._ranks[flow[0]], self._ranks[flow[1]])
        return [channel for channel in channels if channel < self._links]

    def end_of(self, flow: Flow, first: bool) -> tuple[str, float]:
        """The first link on a flow's route, or the last one: its name and its bytes/s in the flow's direction."""
        channel = self.route(flow)[0 if first else -1]
        return self._name(channel), self._capacities[channel]

    def rates(self, flows: Sequence[Flow]) -> list[float]:
        """Bytes/s of simultaneous flows."""
        return fair_rates([self.route(flow) for flow in flows], self._capacities)

    def filled(self, flows: Sequence[Flow]) -> list[tuple[str, float, list[int]]]:
        """The shared links that simultaneous flows fill: name, bytes/s, and indices of the flows that cross it.

        A link is shared if flows from several nodes and to several nodes cross it.
        """
        crosses: dict[int, list[int]] = {}
        for number, flow in enumerate(flows):
            for channel in self.route(flow):
                crosses.setdefault(channel, []).append(number)
        rates, found = self.rates(flows), []
        for channel, some in sorted(crosses.items()):
            shared = all(len({flows[number][end] for number in some}) > 1 for end in (0, 1))
            if shared and sum(rates[number] for number in some) > _NEARLY * self._capacities[channel]:
                found.append((self._name(channel), self._capacities[channel], some))
        return found

    def _name(self, channel: int) -> str:
        return f"link {self._topology.channels[channel].name}"

    def full(self, flows: Sequence[Flow], rates: Sequence[float]) -> tuple[float, float]:
        """How measured ``rates`` (bytes/s) use the links that several flows share and could fill.

        Returns:
            The used share of such links, mean over links; and their number on a flow's route, mean over flows.
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
"""Least gap, in logarithms of rates, between the merge that forms a group and the merge that absorbs it."""


def candidate_groups(contrast: NDArray[numpy.float64]) -> Iterator[tuple[int, ...]]:
    """Groups of nodes that may share an up-link, smaller groups first; by average-linkage clustering.

    Args:
        contrast: [nodes, nodes] rate of each pair in all-to-all traffic, relative to its rate on a single switch.
            Flows through a common bottleneck get less than 1 and leave more for the others.
    """
    nodes = len(contrast)
    if nodes < LEAST_RACKED:  # with fewer than two nodes inside and outside, it is one node's link
        return
    # Late: every job on one host imports this module, and none of them needs these.
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import squareform

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

LEAST_RACKED = 4
"""Nodes from which on two of them can share an up-link to two others."""
TRUNK = 0.85
"""A group that sends less than this share of what its nodes could send has an up-link of its own."""
ALONE = 0.75
"""If a flow gets less than this share of what its two nodes can send and receive, no switch connects them."""
SLOWED = 0.85
"""If a flow gets less than this share of its rate alone, another flow shares a link with it."""
FULL_WINDOWS = 3.0
"""Windows of all-to-all traffic: many flows take longer to find their rates."""

DECISIVE_WINDOWS = 2.0
"""Windows of each measurement that confirms a surprising finding, and the maximum number of such measurements."""
DECISIVE_TRIES = 2
UNLIKE = 0.95
"""A node that sends less than this share of what it receives is measured again: most links are equal both ways."""


class Rates(Protocol):
    """Measures simultaneous flows between nodes, in bytes/s."""

    def rates(self, flows: Sequence[Flow], factor: float = 1.0) -> list[float]: ...

    def prepare(self, sets: Sequence[Sequence[Flow]], factor: float = 1.0) -> None:
        """Learn which sets of flows will be asked for next, since some meters measure them faster together."""
        ...

    def pace(self, node: int) -> float:
        """Bytes/s at which the node's own port sends, whatever its peers can receive."""
        ...


@dataclass
class Survey:
    """Measured rates, in bytes/s on the wire.

    Attributes:
        up, down: [nodes] total rates of each node to and from all others.
        full: [nodes, nodes] rate of each flow in all-to-all traffic; NaN on the diagonal.
        alone: rates of flows that had the network to themselves.
        trunks: rates up and down for each group of nodes with an up-link of its own.
        mesh: direct links, if nodes are cabled without a switch.
        paces: rates of the ports of nodes whose links the other nodes together could not fill.
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


def everybody(nodes: int) -> list[Flow]:
    """A flow from each node to each other."""
    return [(i, j) for i in range(nodes) for j in range(nodes) if i != j]


def take_survey(meter: Rates, nodes: int, every_pair: bool | None) -> Survey:
    """Measure a network.

    Args:
        every_pair: whether to measure every pair alone (True) or one flow from each node alone (False). None measures
            one flow from and to each node, all at once. So ``alone`` has lower bounds, which are enough to see that
            there is a switch.
    """
    flows = everybody(nodes)
    full = numpy.full((nodes, nodes), numpy.nan)
    for (i, j), rate in zip(flows, meter.rates(flows, FULL_WINDOWS), strict=True):
        full[i, j] = rate
    survey = Survey(*_fans(meter, full, flows), full)
    contrast = full / _matrix_of_expected(survey, flows)
    if every_pair is None:
        nearest = _disjoint(contrast)
        survey.alone = dict(zip(nearest, meter.rates(nearest), strict=True))
    else:
        nearest = [(node, int(numpy.nanargmax(contrast[node]))) for node in range(nodes)]
        survey.alone = _measure_alone(meter, flows if every_pair else nearest)
    if nodes > 2 and _no_switch(survey, nearest):
        expected = [ALONE * min(survey.up[i], survey.down[j]) for i, j in nearest]
        found = _most(meter, [[flow] for flow in nearest], [survey.alone[flow] for flow in nearest], expected)
        survey.alone |= zip(nearest, found, strict=True)
    if nodes > 2 and _no_switch(survey, nearest):
        survey.alone |= _measure_alone(meter, [flow for flow in flows if flow not in survey.alone])
        survey.mesh = _direct_links(meter, survey)
        return survey
    groups = list(candidate_groups(contrast))
    if not groups and nodes >= LEAST_RACKED:
        groups = _groups_of_shifts(meter, survey)
    find_trunks(meter, survey, groups, brief=every_pair is None)
    survey.paces = {node: meter.pace(node) for node in range(nodes) if _never_filled(survey, node)}
    return survey


def _measure_alone(meter: Rates, flows: Sequence[Flow]) -> dict[Flow, float]:
    """The rate of each flow while it has the network to itself."""
    meter.prepare([[flow] for flow in flows])
    return {flow: meter.rates([flow])[0] for flow in flows}


def _disjoint(contrast: Floats) -> list[Flow]:
    """One flow from each node and one to each node, between nodes that share few links."""
    numpy.fill_diagonal(weights := contrast.copy(), -1e9)
    return [(int(i), int(j)) for i, j in zip(*linear_sum_assignment(weights, maximize=True), strict=True)]


def _fans(meter: Rates, full: Floats, flows: Sequence[Flow]) -> tuple[list[float], list[float]]:
    """The total rates of each node to and from all others.

    They are measured again where the two differ, or where one is less than in all-to-all traffic.
    """
    nodes = len(full)
    sets = [[flow for flow in flows if flow[end] == node] for end in (0, 1) for node in range(nodes)]
    meter.prepare(sets)
    found = [sum(meter.rates(some)) for some in sets]
    loaded = [*numpy.nansum(full, axis=1), *numpy.nansum(full, axis=0)]
    back = found[nodes:] + found[:nodes]
    expected = [UNLIKE * max(both) for both in zip(back, loaded, strict=True)]
    found = _most(meter, sets, found, expected)
    return found[:nodes], found[nodes:]


def _most(
    meter: Rates, sets: Sequence[Sequence[Flow]], found: Sequence[float], expected: Sequence[float]
) -> list[float]:
    """The total rate of each set of flows in bytes/s, measured again for longer if ``found`` is less than ``expected``.

    A disturbance can only make flows slower, so the best measurement counts.
    """
    best = list(found)
    for _ in range(DECISIVE_TRIES):
        short = [number for number, rate in enumerate(best) if rate < expected[number]]
        meter.prepare([sets[number] for number in short], DECISIVE_WINDOWS)
        for number in short:
            best[number] = max(best[number], sum(meter.rates(sets[number], DECISIVE_WINDOWS)))
    return best


def _matrix_of_expected(survey: Survey, flows: Sequence[Flow]) -> Floats:
    """[nodes, nodes] rates of all-to-all traffic through a single switch, since no up-link is known yet."""
    rates = numpy.ones_like(survey.full)
    for (i, j), rate in zip(flows, expected_rates(survey, flows), strict=True):
        rates[i, j] = rate
    return rates


def expected_rates(survey: Survey, flows: Sequence[Flow]) -> list[float]:
    """Bytes/s of flows that only the nodes' own links and the known up-links limit."""
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
    """Whether most nodes send more to several nodes than to the one node with the least shared route."""
    short = [survey.alone[i, j] < ALONE * min(survey.up[i], survey.down[j]) for i, j in nearest]
    return sum(short) > survey.nodes / 2


def _direct_links(meter: Rates, survey: Survey) -> list[Flow]:
    """The pairs whose flows no third node forwards, and then the likeliest other pairs until all nodes are linked."""
    pairs = [(i, j) for i in range(survey.nodes) for j in range(i + 1, survey.nodes)]
    meter.prepare([flows for pair in pairs for flows in _with_legs(survey.nodes, pair)])
    scores = {pair: _directness(meter, survey, pair) for pair in pairs}
    import networkx  # late, as above

    graph = networkx.Graph()
    graph.add_nodes_from(range(survey.nodes))
    for pair in sorted(pairs, key=lambda pair: -scores[pair]):
        if scores[pair] >= SLOWED or not networkx.has_path(graph, *pair):
            graph.add_edge(*pair)
    return sorted((min(edge), max(edge)) for edge in graph.edges)


def _directness(meter: Rates, survey: Survey, pair: Flow) -> float:
    """How directly a pair of nodes is linked, from 0 to 1.

    If a third node forwards the pair's flow, the flow slows down both legs over that node. So the score is the share of
    its rate alone that the faster leg keeps beside the flow, least over third nodes.
    """
    kept = [1.0]
    for flows in _with_legs(survey.nodes, pair):
        rates = meter.rates(flows)[1:]
        kept.append(max(rate / survey.alone[leg] for rate, leg in zip(rates, flows[1:], strict=True)))
    return min(kept)


def _with_legs(nodes: int, pair: Flow) -> list[list[Flow]]:
    """For each third node, the flow of a pair and its two legs over that node."""
    i, j = pair
    return [[pair, (i, k), (k, j)] for k in range(nodes) if k not in pair]


def find_trunks(meter: Rates, survey: Survey, groups: Sequence[tuple[int, ...]], brief: bool) -> None:
    """Keep the rates up and down of each group that sends or receives less than the known links allow.

    A group of several racks passes: it comes after its racks, and sends what their known up-links allow. A part of a
    rack may have been taken for a rack. The whole rack then sends less than expected, and replaces the part. If it is
    the rack opposite that sends less than expected, its up-link explains what the part sends. ``brief`` measurements
    may end before TCP has filled a long route. So what a group sends in all-to-all traffic counts as well.
    """
    sets = {group: _both_ways(survey, group) for group in groups}
    every = [flows for ways in sets.values() for flows in ways]
    meter.prepare(every)
    rates = [sum(meter.rates(flows)) for flows in every]
    if brief:
        rates = [max(rate, _loaded(survey, flows)) for rate, flows in zip(rates, every, strict=True)]
    rates = _most(meter, every, rates, [TRUNK * sum(expected_rates(survey, flows)) for flows in every])
    found = dict(zip(groups, zip(rates[::2], rates[1::2], strict=True), strict=True))

    def is_slow(group: tuple[int, ...]) -> bool:
        enough = [TRUNK * sum(expected_rates(survey, flows)) for flows in sets[group]]
        return any(rate < least for rate, least in zip(found[group], enough, strict=True))

    for group in groups:
        if is_slow(group):
            kept = {other: rates for other, rates in survey.trunks.items() if not set(other) <= set(group)}
            survey.trunks = {**kept, group: found[group]}
    for group in list(survey.trunks):
        del survey.trunks[group]
        if is_slow(group):
            survey.trunks[group] = found[group]


def _groups_of_shifts(meter: Rates, survey: Survey) -> list[tuple[int, ...]]:
    """Groups of nodes that may share an up-link that limits all-to-all traffic as much as the nodes' own links do.

    Such traffic does not show them. Where each node sends to one other, an up-link limits more than the nodes' links.
    Two such sets of flows are measured first. All of them are measured if one of these two is slow.
    """
    nodes = survey.nodes
    sets = [[(node, (node + shift) % nodes) for node in range(nodes)] for shift in range(1, nodes)]

    def contrasts(some: Sequence[Sequence[Flow]]) -> dict[Flow, float]:
        meter.prepare(some, DECISIVE_WINDOWS)
        return {
            flow: rate / expected
            for flows in some
            for flow, rate, expected in zip(
                flows, meter.rates(flows, DECISIVE_WINDOWS), expected_rates(survey, flows), strict=True
            )
        }

    if min(contrasts([sets[0], sets[nodes // 2 - 1]]).values()) >= TRUNK:
        return []
    found = contrasts(sets)
    if not all(found.values()):  # there was no time
        return []
    contrast = numpy.full((nodes, nodes), numpy.nan)
    for flow, value in found.items():
        contrast[flow] = value
    return list(candidate_groups(contrast))


def _loaded(survey: Survey, flows: Sequence[Flow]) -> float:
    """What the sources of flows send to their targets in all-to-all traffic. It fills a slow up-link, too."""
    sources, targets = (sorted(set(ends)) for ends in zip(*flows, strict=True))
    return float(survey.full[numpy.ix_(sources, targets)].sum())


def _both_ways(survey: Survey, group: Sequence[int]) -> tuple[list[Flow], list[Flow]]:
    """Flows from a group to the other nodes, and back."""
    flows = pairing(group, [node for node in range(survey.nodes) if node not in group])
    return flows, [(j, i) for i, j in flows]


def pairing(group: Sequence[int], others: Sequence[int]) -> list[Flow]:
    """Flows from one side to the other in which every node of either side takes part."""
    return [(group[k % len(group)], others[k % len(others)]) for k in range(max(len(group), len(others)))]


def _never_filled(survey: Survey, node: int) -> bool:
    """Whether the node sends about as much as all others together can receive, so that its link may carry more."""
    others = sum(rate for other, rate in enumerate(survey.down) if other != node)
    return survey.up[node] > TRUNK * others
