"""Sending rates for each peer of a rank, chosen so that all parts of a message arrive at the same time.

TCP splits a shared link equally between its connections, however much each must carry. If a rank sends most of a
message to one peer and a little to many others, the small parts arrive early, and the links behind them are idle until
the large part arrives. Each connection is therefore paced to the share of the link that it needs.

A connection with a pace cannot catch up. Beside one without a pace, it falls behind, and its link is idle at the end.
So the connections of a link either all have paces, or none has one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cache
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from lightning_autosync.cluster import PAYLOAD_SHARE, LinkGraph
from lightning_autosync.plan.pairwise import PairwiseReduce
from lightning_autosync.plan.schedule import Message, Round, RowBroadcast, Schedule, Transfer, TreeTransfer

HEADROOM = 1.01
"""Factor on the exact rate that lets a connection catch up. With a larger factor, the many small connections of a full
link crowd out the large one: a fat node and seven leaves reached 90% of their bound with 1.10, and 96% with 1.01."""
NARROWEST = 1 + 1e-6
"""A link limits a connection if it allows at most this factor of what the narrowest one allows."""
LEAST_PART = 0.02
"""Share of a route's rate below which a connection is not paced: it crowds out no other, and sends mostly headers."""
UNSENT_LIMIT = 64 * 1024
"""Bytes that the kernel may hold unsent. The limit keeps urgent frames from queueing behind megabytes. The engine sets
it, and the replay knows it."""

_SLACK = 2e-3
"""Seconds of data in flight beyond the round trip, because a busy host acknowledges late."""
_SMALLEST_WINDOW = 64 * 1024
"""Bytes in flight of a slow connection, so that it does not wake its sender too often (see `_seconds_in_flight`)."""
_LEAST_WINDOW = 32 * 1024
"""Bytes in flight of the slow direction of a route at least: with few packets, it would wait for acknowledgements."""
_LONGEST_WAIT = 20e-3
"""Seconds. A connection that shares its route has less than `_LEAST_WINDOW` in flight if sending that takes longer."""
_FEWEST_BYTES = 8 * 1024
"""Least bytes in flight of a connection that shares its route, however slow it is."""

Arc = tuple[int, int, int]
"""Sender, receiver, and the interface over which they are connected."""

Floats = NDArray[numpy.float64]
Flags = NDArray[numpy.bool_]


class Need(NamedTuple):
    """What a connection needs of a route that it shares with others.

    Attributes:
        rate: payload bytes/s that it needs at most while the others send, too; a typical rate where rows travel.
        pace: limit on its payload bytes/s; None for no limit.
    """

    rate: float
    pace: float | None


def sending_needs(schedule: Schedule, topology: LinkGraph, rank: int, interface: int = 0) -> dict[int, Need]:
    """What the connections over which ``rank`` sends on an interface need, by peer.

    Some messages travel at the same time, others one after another. If a message sends y bytes over a link, x of them
    on this connection, the connection needs x/y of the link while this message travels alone. While several messages
    share the link, it needs at most the largest of their shares. So no mix of messages needs more than the least,
    over the links of the route, of the largest share times the link's rate. `pipeline_stretches` corrects this rate
    for the pace.

    A connection is left out if it may need its whole route, or stays inside a node, where no link is shared.

    A connection has no pace in these cases:

    - It may need its whole route.
    - A row-wise message travels over it, because the number of rows is unknown. The rate for such a message assumes
      equally many rows on all ranks, all of them in one transfer.
    - Pairs exchange a message over it, because it is used in few of their exchanges.
    - The link that limits it is also used by a connection that has no pace for one of these reasons, this one included.
      With paces beside connections without, steps took up to 24% longer.
    - It needs less than `LEAST_PART` of its route. Others keep their paces beside it.

    Raises:
        ClusterError: the rates of the cluster are unknown.
    """
    rates, unpaced = _needed_rates(schedule, topology)
    stretches = pipeline_stretches(schedule, rank, interface)
    needs = {}
    for arc, rate in rates.items():
        source, peer, own = arc
        route = topology.bandwidth(*arc)
        if source == rank and own == interface and rate < route:
            pace = HEADROOM * stretches.get(peer, 1.0) * rate
            paced = arc not in unpaced and LEAST_PART * route <= rate and pace < route
            # Link rates include headers, a connection's rates count payload only.
            needs[peer] = Need(PAYLOAD_SHARE * rate, PAYLOAD_SHARE * pace if paced else None)
    return needs


def _needed_rates(schedule: Schedule, topology: LinkGraph) -> tuple[dict[Arc, float], set[Arc]]:
    """Bytes/s on the wire that each connection between nodes needs at most, and those connections that have no pace."""
    nodes, capacities, routes = topology.spec.rank_nodes, topology.capacities.tolist(), cache(topology.route)
    shares: dict[Arc, dict[int, float]] = defaultdict(dict)
    unpaced: set[Arc] = set()
    for message in schedule.messages:
        for round in message.rounds:
            for arcs, alone in _parts(message, round):
                loads: dict[int, int] = defaultdict(int)
                for arc, elements in arcs.items():
                    for channel in routes(*arc):
                        loads[channel] += elements
                for arc, elements in arcs.items():
                    if not elements or nodes[arc[0]] == nodes[arc[1]]:
                        continue
                    if alone:
                        unpaced.add(arc)
                    of_arc = shares[arc]
                    for channel in routes(*arc):
                        of_arc[channel] = max(of_arc.get(channel, 0.0), elements / loads[channel])
    rates: dict[Arc, float] = {}
    limited: dict[int, list[Arc]] = defaultdict(list)
    for arc, of_arc in shares.items():
        allowed = {channel: share * capacities[channel] for channel, share in of_arc.items()}
        rates[arc] = rate = min(allowed.values())
        if rate >= min(capacities[channel] for channel in of_arc):
            unpaced.add(arc)
        for channel, each in allowed.items():
            if each < NARROWEST * rate:
                limited[channel].append(arc)
    return rates, _with_neighbours(unpaced, shares, limited)


def _with_neighbours(
    chosen: Set[Arc], channels: Mapping[Arc, Iterable[int]], limited: Mapping[int, Iterable[Arc]]
) -> set[Arc]:
    """The chosen connections, all connections that a channel of a chosen one limits, the neighbours of those, etc.

    Args:
        chosen: some connections.
        channels: the channels of each connection's route.
        limited: the connections that each channel limits.
    """
    found, new, seen = set(chosen), list(chosen), set[int]()
    while new:
        for channel in channels[new.pop()]:
            if channel not in seen:
                seen.add(channel)
                new.extend(arc for arc in limited.get(channel, ()) if arc not in found)
                found.update(limited.get(channel, ()))
    return found


def send_buffers(
    route: Floats | float, back: Floats | float, round_trip: Floats | float, rate: Floats | float, paced: Flags | bool
) -> Floats:
    """Sizes of send buffers that hold what routes carry, and no more.

    Linux doubles the size that it is asked for, to allow for its own data beside the payload. So a connection has up to
    twice as many bytes in flight.

    Args:
        route, back: [connections] bytes/s on the wire of the route and of the route back.
        round_trip: [connections] seconds of an idle route and the route back.
        rate: [connections] bytes/s that the connection needs of the route; infinite for all of it. Connections that
            share a link would otherwise queue as much as if each had it alone. Urgent frames would wait behind all of
            that, and a queue that overflows loses packets: with `_LEAST_WINDOW` for each of sixteen connections between
            two racks, steps took 1.3 times as long.
        paced: [connections] whether the connection has a pace. Without one, it may send more than its share at times.

    Returns:
        [connections] bytes to ask for.
    """
    seconds = _seconds_in_flight(route, back, round_trip)
    shares, needed = rate < numpy.inf, numpy.minimum(rate, route)
    most = numpy.where(paced, _LEAST_WINDOW, numpy.maximum(_LEAST_WINDOW, route * seconds))
    least = numpy.minimum(most, numpy.maximum(_FEWEST_BYTES, needed * _LONGEST_WAIT))
    sizes: Floats = numpy.floor(numpy.maximum(numpy.where(shares, least, _LEAST_WINDOW), needed * seconds))
    return sizes


def _seconds_in_flight(route: Floats | float, back: Floats | float, round_trip: Floats | float) -> Floats:
    """Seconds in which a route carries what a connection has in flight; the same in both directions.

    If one direction had more, it would delay the acknowledgements of the other one, which would then not fill its link.
    So a direction has less than `_SMALLEST_WINDOW` in flight where the way back is more than twice as fast; otherwise
    the way back would need a long queue. If directions differ more than fourfold, the slow one has `_LEAST_WINDOW`
    (less if it shares its route with many).
    (Three ranks on links of up to 1 : 4 reached 83% of their bound with `_SMALLEST_WINDOW` in each direction, and 90%
    with equal seconds.)

    Args:
        route, back: bytes/s of the route and of the route back.
        round_trip: seconds.
    """
    enough = numpy.minimum(
        _SMALLEST_WINDOW / numpy.minimum(route, back), 2 * _SMALLEST_WINDOW / numpy.maximum(route, back)
    )
    seconds: Floats = numpy.maximum(numpy.add(round_trip, _SLACK), enough)
    return seconds


def pipeline_stretches(schedule: Schedule, rank: int, interface: int = 0) -> dict[int, float]:
    """Factors on a connection's rate that make up for the time in which its pipeline fills, by peer of ``rank``.

    A piece takes one hop after another, up its tree and down again (`TreeTransfer.hops`). The last of n pieces over h
    hops arrives after the time of n + h - 1 pieces. Transfers of a round run concurrently, so the largest numbers of
    pieces and hops count. Rounds of a message run one after another. Messages are assumed to follow each other without
    a gap, so that the pipelines fill only once.
    """
    pieces: Counter[int] = Counter()
    fills: Counter[int] = Counter()
    for message in schedule.messages:
        of_message: Counter[int] = Counter()
        for round in message.rounds:
            most, hops = _of_round(round, rank, interface)
            pieces += most
            of_message += hops
        fills |= of_message
    return {peer: (count + fills[peer]) / count for peer, count in pieces.items()}


def _of_round(round: Round, rank: int, interface: int) -> tuple[Counter[int], Counter[int]]:
    """The largest number of pieces of a transfer, and of hops after a piece's first, by peer."""
    pieces: Counter[int] = Counter()
    hops: Counter[int] = Counter()
    for transfer in round.transfers:
        if isinstance(transfer, TreeTransfer):
            count = -(-(transfer.stop - transfer.start) // transfer.segment)
            further = transfer.hops - 1
            for peer in _neighbours(transfer, rank, interface):
                pieces[peer] = max(pieces[peer], count)
                hops[peer] = max(hops[peer], further)
    return pieces, hops


def _neighbours(transfer: TreeTransfer, rank: int, interface: int) -> set[int]:
    """The parents and children of a rank on the transfer's trees over an interface."""
    trees = [tree for tree in (transfer.reduce, transfer.broadcast) if tree.interface == interface]
    return {peer for tree in trees for peer in (tree.parents[rank], *tree.children[rank]) if peer >= 0}


def _parts(message: Message, round: Round) -> list[tuple[dict[Arc, int], bool]]:
    """Elements that travel at the same time, by connection, and whether they may be a part of the message only.

    All rows may lie in one transfer's range, and a few rows travel over the first transfer only. Exchanges between
    pairs follow each other.
    """
    if message.rows:
        return [(_arc_elements((one,)), True) for one in round.transfers]
    swaps = {swap for one in round.transfers if isinstance(one, PairwiseReduce) for swap in one.swaps}
    if swaps:
        return [({(*pair, 0): 1 for pair in swap.sending}, True) for swap in swaps]
    return [(_arc_elements(round.transfers), False)]


def _arc_elements(transfers: Sequence[Transfer]) -> dict[Arc, int]:
    """Elements sent along all trees of transfers."""
    arcs: dict[Arc, int] = defaultdict(int)
    for transfer in transfers:
        if isinstance(transfer, TreeTransfer):
            elements = transfer.stop - transfer.start
            for rank, parent in enumerate(transfer.reduce.parents):
                if parent >= 0:
                    arcs[rank, parent, transfer.reduce.interface] += elements
            for rank, parent in enumerate(transfer.broadcast.parents):
                if parent >= 0:
                    arcs[parent, rank, transfer.broadcast.interface] += elements
        elif isinstance(transfer, RowBroadcast):
            for tree in transfer.trees:
                for rank, parent in enumerate(tree.parents):
                    if parent >= 0:
                        arcs[parent, rank, tree.interface] += transfer.stop - transfer.start
    return arcs
