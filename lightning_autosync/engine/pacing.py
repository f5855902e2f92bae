"""How fast a rank should send to each of its peers, so that all parts of a message arrive at the same time.

TCP gives connections that share a link equal parts of it, whatever each has to carry. If a rank sends most of a message
to one peer and a little to many others, the small parts arrive early, and links behind them are idle until the large
part arrives. So each connection is paced to its own share of the link.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

import numpy

from lightning_autosync.cluster import PAYLOAD_SHARE, LinkGraph
from lightning_autosync.plan.schedule import Message, Round, Schedule, TreeTransfer

HEADROOM = 1.01
"""Factor on the exact rate, with which a connection can catch up. With more, the many small connections of a full link
crowd out the large one: a fat node and seven leaves reached 90% of their bound with 1.10, and 96% with 1.01."""
LEAST_PART = 0.02
"""Share of a route's rate below which a connection is not paced: it crowds out nobody, and sends mostly headers."""

Arc = tuple[int, int]


def pacing_rates(schedule: Schedule, topology: LinkGraph, rank: int) -> dict[int, float]:
    """The payload bytes/s that ``rank`` should not exceed, by peer; peers without a limit are left out.

    A round takes at least the time for which its fullest channel is busy. A connection that carries x bytes of the
    round need not send more than x bytes in that time, times `pipeline_stretches`. Rounds may travel one at a time, so
    the fastest of a peer's rounds counts. There is no limit for a connection that may need its whole route, for one
    that needs less than `LEAST_PART` of it, and inside a node, where no link is shared. The size of a row-wise message
    is not known beforehand, so it may need the whole route.

    Raises:
        ClusterError: the rates of the cluster are unknown.
    """
    needed: dict[int, float] = defaultdict(float)
    for message in schedule.messages:
        for round in message.rounds:
            for (source, target), rate in _arc_rates(message, round, topology).items():
                if source == rank:
                    needed[target] = max(needed[target], rate)
    stretches, nodes = pipeline_stretches(schedule, rank), topology.spec.rank_nodes
    paces = {}
    for peer, rate in needed.items():
        route, pace = topology.bandwidth(rank, peer), HEADROOM * stretches.get(peer, 1.0) * rate
        if nodes[peer] != nodes[rank] and LEAST_PART * route <= rate and pace < route:
            paces[peer] = PAYLOAD_SHARE * pace  # links count whole frames, pacing counts payload
    return paces


def pipeline_stretches(schedule: Schedule, rank: int) -> dict[int, float]:
    """By peer of ``rank``, the factor on a connection's rate that makes up for the filling of its pipeline.

    A piece takes one hop after the other, up its tree and down again. Of n pieces in a row over h hops, the last one
    arrives after the time of n + h - 1 pieces. The transfers of a round travel side by side: the largest number of
    pieces and the largest number of hops count. The rounds of a message wait for each other. Messages are assumed to
    follow each other without a gap, so that the pipelines fill once for all of them.
    """
    pieces: Counter[int] = Counter()
    fills: Counter[int] = Counter()
    for message in schedule.messages:
        of_message: Counter[int] = Counter()
        for round in message.rounds:
            most, hops = _of_round(round, rank)
            pieces += most
            of_message += hops
        fills |= of_message
    return {peer: (count + fills[peer]) / count for peer, count in pieces.items()}


def _of_round(round: Round, rank: int) -> tuple[Counter[int], Counter[int]]:
    """By peer the most pieces that one transfer sends it, and the most hops that follow a piece's first."""
    pieces: Counter[int] = Counter()
    hops: Counter[int] = Counter()
    for transfer in round.transfers:
        if isinstance(transfer, TreeTransfer):
            count = -(-(transfer.stop - transfer.start) // transfer.segment)
            further = transfer.reduce.depth + transfer.broadcast.depth - 1
            for peer in _neighbours(transfer, rank):
                pieces[peer] = max(pieces[peer], count)
                hops[peer] = max(hops[peer], further)
    return pieces, hops


def _neighbours(transfer: TreeTransfer, rank: int) -> set[int]:
    """The parents and the children of a rank."""
    trees = (transfer.reduce, transfer.broadcast)
    return {peer for tree in trees for peer in (tree.parents[rank], *tree.children[rank]) if peer >= 0}


def _arc_rates(message: Message, round: Round, topology: LinkGraph) -> dict[Arc, float]:
    """Bytes/s on the wire, from one rank to another, that a round in the least time needs."""
    arcs = _arc_elements(round)
    if message.rows:
        return {arc: topology.bandwidth(*arc) for arc in arcs}
    least = _least_time(arcs, topology)
    return {arc: elements / least for arc, elements in arcs.items() if elements}


def _arc_elements(round: Round) -> dict[Arc, int]:
    """Elements from one rank to another, up and down all trees of a round."""
    arcs: dict[Arc, int] = defaultdict(int)
    for transfer in round.transfers:
        if isinstance(transfer, TreeTransfer):
            elements = transfer.stop - transfer.start
            for rank, parent in enumerate(transfer.reduce.parents):
                if parent >= 0:
                    arcs[rank, parent] += elements
            for rank, parent in enumerate(transfer.broadcast.parents):
                if parent >= 0:
                    arcs[parent, rank] += elements
    return arcs


def _least_time(arcs: Mapping[Arc, int], topology: LinkGraph) -> float:
    """Seconds for which the fullest channel is busy if an element is a byte; the size of an element cancels out."""
    loads = numpy.zeros(len(topology.channels))
    for arc, elements in arcs.items():
        loads[list(topology.route(*arc))] += elements
    return float((loads / topology.capacities).max(initial=0.0))
