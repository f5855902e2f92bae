"""Sending rates for each peer of a rank, chosen so that all parts of a message arrive at the same time.

TCP splits a shared link equally between its connections, however much each must carry. If a rank sends most of a
message to one peer and a little to many others, the small parts arrive early, and the links behind them are idle until
the large part arrives. Each connection is therefore paced to the share of the link that it needs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

import numpy

from lightning_autosync.cluster import PAYLOAD_SHARE, LinkGraph
from lightning_autosync.plan.schedule import Message, Round, RowBroadcast, Schedule, TreeTransfer

HEADROOM = 1.01
"""Factor on the exact rate that lets a connection catch up. With a larger factor, the many small connections of a full
link crowd out the large one: a fat node and seven leaves reached 90% of their bound with 1.10, and 96% with 1.01."""
LEAST_PART = 0.02
"""Share of a route's rate below which a connection is not paced: it crowds out no other, and sends mostly headers."""

Arc = tuple[int, int]


def pacing_rates(schedule: Schedule, topology: LinkGraph, rank: int) -> dict[int, float]:
    """Limits on the payload bytes/s that ``rank`` sends, by peer; peers without a limit are left out.

    A round takes at least as long as its busiest channel. A connection that carries x bytes of the round must send
    x bytes in that time; `pipeline_stretches` corrects this rate. Rounds may travel one at a time, so the highest rate
    of a peer's rounds counts.

    A connection has no limit if it may need its whole route, if it needs less than `LEAST_PART` of it, or if it stays
    inside a node, where no link is shared. A row-wise message may need the whole route, because its size is unknown.

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
            paces[peer] = PAYLOAD_SHARE * pace  # link rates include headers, pacing counts payload only
    return paces


def pipeline_stretches(schedule: Schedule, rank: int) -> dict[int, float]:
    """Factors on a connection's rate that make up for the time in which its pipeline fills, by peer of ``rank``.

    A piece takes one hop after another, up its tree and down again. The last of n pieces over h hops arrives after the
    time of n + h - 1 pieces. Transfers of a round run concurrently, so the largest numbers of pieces and hops count.
    Rounds of a message run one after another. Messages are assumed to follow each other without a gap, so that the
    pipelines fill only once.
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
    """The largest number of pieces of a transfer, and of hops after a piece's first, by peer."""
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
    """The parents and children of a rank on both trees."""
    trees = (transfer.reduce, transfer.broadcast)
    return {peer for tree in trees for peer in (tree.parents[rank], *tree.children[rank]) if peer >= 0}


def _arc_rates(message: Message, round: Round, topology: LinkGraph) -> dict[Arc, float]:
    """Bytes/s on the wire that the fastest possible round needs, by pair of sender and receiver."""
    arcs = _arc_elements(round)
    if message.rows:
        return {arc: topology.bandwidth(*arc) for arc in arcs}
    least = _least_time(arcs, topology)
    return {arc: elements / least for arc, elements in arcs.items() if elements}


def _arc_elements(round: Round) -> dict[Arc, int]:
    """Elements sent along all trees of a round, by pair of sender and receiver."""
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
        elif isinstance(transfer, RowBroadcast):
            for tree in transfer.trees:
                for rank, parent in enumerate(tree.parents):
                    if parent >= 0:
                        arcs[parent, rank] += transfer.stop - transfer.start
    return arcs


def _least_time(arcs: Mapping[Arc, int], topology: LinkGraph) -> float:
    """Seconds for which the busiest channel is busy, with one byte per element: the real size cancels out later."""
    loads = numpy.zeros(len(topology.channels))
    for arc, elements in arcs.items():
        loads[list(topology.route(*arc))] += elements
    return float((loads / topology.capacities).max(initial=0.0))
