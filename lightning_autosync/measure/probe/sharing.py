"""How flows share links: progressive filling to max-min fair rates (Bertsekas and Gallager, Data Networks, 6.5.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from lightning_autosync.cluster import ClusterSpec, Topology

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
        self._topology = Topology(cluster)
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
