"""The paces of the transport's connections by the rule of `lightning_autosync.plan.pacing`, for all ranks at once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from lightning_autosync.cluster.units import FRAMING, PAYLOAD_SHARE
from lightning_autosync.plan.pacing import HEADROOM, LEAST_PART, NARROWEST, send_buffers
from lightning_autosync.replay.compiled import compiled
from lightning_autosync.replay.loads import Loads
from lightning_autosync.replay.network import Flags, Floats, Indices, Integers, NetworkArrays, Routes, Trees
from lightning_autosync.replay.pipelines import Flows
from lightning_autosync.replay.stages import Stage

_log = logging.getLogger(__name__)

_MOST = 2_000_000
"""Largest number of stages (and transfers of rows) times connections. Beyond it, which takes hundreds of ranks, no
connection has a pace, and frames do not know what the kernel holds; a line of the log at level DEBUG says so."""
_SEGMENT = 1448 * FRAMING
"""Bytes of a TCP segment on the wire."""
_BURST = 10 * _SEGMENT
"""Most bytes of a burst. Linux sends up to half of its window at once. The window grows from ten segments to twenty,
because the first ten leave without a pace. A pace below the link's rate then never fills it, so it stays."""
_LEAST_BURST = 2 * _SEGMENT
"""Least bytes of a burst (``tcp_min_tso_segs``)."""
_BURST_SECONDS = 2**-10
"""A burst has what the pace allows in this time, in seconds, and a surplus (``tcp_tso_autosize``)."""
_SURPLUS = 64 * 1024.0
"""Bytes of the surplus if the round trip is short. It is halved for each `_HALVING` of the round trip."""
_HALVING = 512e-6
"""Seconds of a round trip (``tcp_tso_rtt_log``)."""


class Paces(NamedTuple):
    """The transport's connections between nodes: the paces that some have, and what the kernel holds on all.

    The engine leaves a send buffer to the kernel if the host allows none as large (``wmem_max``). As much is queued
    then: with one connection on emulated links, 260 kB in place of 230 kB at 1 Gbit/s, and 530 kB in place of 590 kB at
    2 Gbit/s (medians).

    Attributes:
        pairs: [connections] numbers in `NetworkArrays` of those with a pace.
        rates: [connections] most bytes/s on the wire of those with a pace.
        used: [connections] numbers of all that carry data.
        held: [connections] bytes that the kernel takes over ahead on each of ``used``. An urgent frame waits for these.
    """

    pairs: Indices
    rates: Floats
    used: Indices
    held: Floats

    @classmethod
    def none(cls) -> Paces:
        """No connections."""
        nothing, zeros = numpy.zeros(0, dtype=numpy.int64), numpy.zeros(0)
        return cls(nothing, zeros, nothing, zeros)

    @classmethod
    def of(cls, stages: Sequence[Stage], loads: Loads, trees: Trees, network: NetworkArrays) -> Paces:
        """The paces of a schedule's stages with these loads."""
        on_trees = numpy.array([not stage.collective and bool(stage.flows) for stage in stages], dtype=numpy.bool_)
        pairs = _both_ways(loads.pairs[on_trees], network)
        # As in the engine, all rows may lie in one transfer's range, and exchanges follow each other.
        transfers = list(dict.fromkeys(transfer for stage in stages for transfer in stage.row_trees))
        shape = len(stages) + len(transfers), len(pairs)
        if shape[0] * shape[1] > _MOST:
            _log.debug(
                "paces are ignored: %d stages and transfers of rows times %d connections exceed %d", *shape, _MOST
            )
            return cls.none()
        if not shape[0] * shape[1]:
            return cls.none()
        place = numpy.full(network.pairs, -1, dtype=numpy.int64)
        place[pairs] = numpy.arange(len(pairs))
        carried, (pieces, further) = numpy.zeros(shape), numpy.zeros((2, len(stages), len(pairs)))
        _carry(loads.flows, trees, on_trees, place, carried, pieces, further)
        carries = carried.any(axis=0)
        work = numpy.pad(loads.work / loads.stretch[:, None], ((0, len(transfers)), (0, 0)))
        for number, transfer in enumerate(transfers, len(stages)):
            _count_rows(numpy.array(transfer), trees, network.routes, place, carried[number], work[number])
        carried[: len(stages)][[bool(stage.row_trees) for stage in stages]] = 0
        nodes = numpy.array(network.link_graph.spec.rank_nodes)
        apart = nodes[pairs // network.ranks % network.ranks] != nodes[pairs % network.ranks]
        rate, whole, limiting = _needed(pairs, carried, work, network.routes, network.capacities)
        unpaced = apart & (carried[len(stages) :].any(axis=0) | (rate >= whole))
        _add_neighbours(unpaced, pairs, limiting & apart[:, None], network.routes, len(network.capacities))
        fills = numpy.zeros((1 + max(stage.message for stage in stages), len(pairs)))
        numpy.add.at(fills, [stage.message for stage in stages], further)
        pace = HEADROOM * (1 + fills.max(axis=0) / numpy.maximum(pieces.sum(axis=0), 1)) * rate
        paced = apart & ~unpaced & (rate > 0) & (LEAST_PART * whole <= rate) & (pace < whole)
        used = apart & carries
        return cls(pairs[paced], pace[paced], pairs[used], _held(pairs, rate, whole, paced, network)[used])


def bursts_of(rates: Floats, latencies: Floats) -> Floats:
    """The bursts in which Linux sends on connections with paces.

    Args:
        rates: [connections] bytes/s on the wire.
        latencies: [connections] seconds one way.

    Returns:
        [connections] bytes on the wire that leave at once.
    """
    halvings = numpy.floor(2 * latencies / _HALVING)
    return numpy.clip(_BURST_SECONDS * rates + _SURPLUS * 0.5**halvings, _LEAST_BURST, _BURST)


def _held(pairs: Indices, rate: Floats, whole: Floats, paced: Flags, network: NetworkArrays) -> Floats:
    """Bytes that the kernel takes over ahead, by the size of send buffers, without those that are on their way."""
    ranks, routes = network.ranks, network.routes
    row, target = numpy.divmod(pairs, ranks)
    reverse = numpy.searchsorted(pairs, (row // ranks * ranks + target) * ranks + row % ranks)
    latency = routes.latencies[routes.between[row, target]]
    round_trip = latency + latency[reverse]
    needed = numpy.where(rate < whole, PAYLOAD_SHARE * rate, numpy.inf)
    buffers = send_buffers(whole, whole[reverse], round_trip, needed, paced)
    held: Floats = 2 * buffers - numpy.minimum(rate, whole) * round_trip
    return held


def _both_ways(used: NDArray[numpy.uint64], network: NetworkArrays) -> Indices:
    """The connections of any stage, and their reverse; ``used`` has a bit set for each stage."""
    merged = numpy.bitwise_or.reduce(used, axis=0)
    bits = numpy.unpackbits(merged.astype("<u8").view(numpy.uint8), bitorder="little")[: network.pairs]
    tables = bits.reshape(-1, network.ranks, network.ranks)
    return numpy.flatnonzero(tables | tables.transpose(0, 2, 1))


@compiled
def _carry(
    flows: Flows,
    trees: Trees,
    on_trees: NDArray[numpy.bool_],
    place: Indices,
    carried: Floats,
    pieces: Floats,
    further: Floats,
) -> None:
    """Fill in [stages, pairs] bytes, the most pieces of a flow between two ranks, and hops after a piece's first."""
    ranks = trees.parents.shape[1]
    for flow in range(len(flows.stage)):
        stage = flows.stage[flow]
        if not on_trees[stage]:
            continue
        ways = (flows.up[flow], flows.down[flow])
        hops = _hops(trees, ways, flows.second[flow]) - 1
        for way in range(2):
            if ways[way] < 0:
                continue
            first = trees.first[ways[way]]
            for rank in range(ranks):
                parent = trees.parents[ways[way], rank]
                if parent < 0:
                    continue
                up, down = place[(first + rank) * ranks + parent], place[(first + parent) * ranks + rank]
                carried[stage, up if way == 0 else down] += flows.copies[flow] * flows.wire[flow]
                if ways[0] < 0:
                    continue  # as in the engine, rows that travel once count in no pipeline
                for pair in (up, down):
                    pieces[stage, pair] = max(pieces[stage, pair], flows.pieces[flow])
                    further[stage, pair] = max(further[stage, pair], hops)


@compiled
def _count_rows(transfer: Indices, trees: Trees, routes: Routes, place: Indices, carried: Floats, work: Floats) -> None:
    """Fill in how often a transfer's trees [trees, 2] use each of the [pairs] and each of the [channels]."""
    ranks = trees.parents.shape[1]
    for number in range(len(transfer)):
        for way in range(2):
            tree = transfer[number, way]
            if tree < 0:
                continue
            for rank in range(ranks):
                parent = trees.parents[tree, rank]
                if parent < 0:
                    continue
                source, target = (rank, parent) if way == 0 else (parent, rank)
                row = trees.first[tree] + source
                if place[row * ranks + target] >= 0:
                    carried[place[row * ranks + target]] += 1
                route = routes.between[row, target]
                for hop in range(routes.starts[route], routes.starts[route + 1]):
                    work[routes.hops[hop]] += 1


@compiled
def _hops(trees: Trees, ways: tuple[int, int], second: int) -> int:
    """As `TreeTransfer.hops`, for the trees up and down, and a second root or -1."""
    rise, rise_there = _halves(trees.parents, trees.order, ways[0], second)
    fall, fall_there = _halves(trees.parents, trees.order, ways[1], second)
    if second < 0:
        return rise + fall
    return max(max(rise, 1 + rise_there) + fall, max(rise_there, 1 + rise) + fall_there)


@compiled
def _halves(parents: Integers, order: Integers, tree: int, second: int) -> tuple[int, int]:
    """Hops from the root of a tree to the farthest rank, and from the second root; each without the other's subtree."""
    if tree < 0:
        return 0, 0
    depths = numpy.zeros(parents.shape[1], dtype=numpy.int64)
    there = numpy.zeros(parents.shape[1], dtype=numpy.bool_)
    for place in range(parents.shape[1]):
        rank = order[tree, place]
        parent = parents[tree, rank]
        there[rank] = rank == second or (parent >= 0 and there[parent])
        if parent >= 0 and rank != second:
            depths[rank] = depths[parent] + 1
    return int((depths * ~there).max()), int((depths * there).max())


@compiled
def _needed(
    pairs: Indices, carried: Floats, work: Floats, routes: Routes, capacities: Floats
) -> tuple[Floats, Floats, Flags]:
    """What connections need in any mix of stages and rows.

    Returns:
        [pairs] bytes/s that a connection needs at most; those of its route alone; and [pairs, longest route] whether
        each channel of its route limits it.
    """
    needed, whole = numpy.full(len(pairs), numpy.inf), numpy.full(len(pairs), numpy.inf)
    longest = (routes.starts[1:] - routes.starts[:-1]).max()
    limiting, allowed = numpy.zeros((len(pairs), longest), dtype=numpy.bool_), numpy.zeros(longest)
    for place in range(len(pairs)):
        channels = _channels(pairs[place], routes)
        for hop, channel in enumerate(channels):
            share = 0.0
            for stage in range(len(carried)):
                if carried[stage, place] > 0:
                    share = max(share, carried[stage, place] / work[stage, channel])
            allowed[hop] = share * capacities[channel]
            needed[place] = min(needed[place], allowed[hop])
            whole[place] = min(whole[place], capacities[channel])
        for hop in range(len(channels)):
            limiting[place, hop] = allowed[hop] < NARROWEST * needed[place]
    return needed, whole, limiting


@compiled
def _add_neighbours(chosen: Flags, pairs: Indices, limiting: Flags, routes: Routes, channels: int) -> None:
    """Choose all connections, too, that a channel of a chosen one limits, the neighbours of those, and so on."""
    taken = numpy.zeros(channels, dtype=numpy.bool_)
    new = numpy.flatnonzero(chosen)
    while len(new):
        for pair in pairs[new]:
            for channel in _channels(pair, routes):
                taken[channel] = True
        before = chosen.copy()
        for place in range(len(pairs)):
            for hop, channel in enumerate(_channels(pairs[place], routes)):
                chosen[place] |= limiting[place, hop] and taken[channel]
        new = numpy.flatnonzero(chosen & ~before)


@compiled
def _channels(pair: int, routes: Routes) -> Integers:
    """The channels of a connection's route."""
    route = routes.between[pair // routes.between.shape[1], pair % routes.between.shape[1]]
    return routes.hops[routes.starts[route] : routes.starts[route + 1]]
