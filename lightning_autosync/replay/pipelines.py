"""The load of flows on channels, and the time in which their pipelines fill and drain; compiled by numba."""

from __future__ import annotations

from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from lightning_autosync.replay.compiled import compiled
from lightning_autosync.replay.network import Flags, Floats, Indices, Integers, Routes, Trees


class Flows(NamedTuple):
    """The flows of several stages as arrays [flows], and the costs of their stages.

    Attributes:
        stage: stage of each flow.
        up, down, wire, values, pieces, copies, second, turn: as in `Flow`.
        costs: [stages, 7] seconds per byte to gather, to seal and to open, per frame at each end, and per hop; then the
            number of latencies of a hop, and seconds per byte at each of two roots.
        growth: [stages, ranks + 1] as in `Stage`; ones for dense stages.
        host_cost: seconds per byte, as in `Constants`.
    """

    stage: Indices
    up: Indices
    down: Indices
    wire: Floats
    values: Floats
    pieces: Indices
    copies: Indices
    second: Indices
    turn: Indices
    costs: Floats
    growth: Floats
    host_cost: float


class Paths(NamedTuple):
    """Trees, routes and channels for compiled code.

    Attributes:
        trees: trees of the flows.
        routes: routes between ranks.
        capacities: [channels] as in `NetworkArrays`.
        links: number of link channels, which come before the hosts.
        shared: channel of the shared cores; -1 for none.
        paced: [pairs] channel of each paced connection, by its number in `NetworkArrays`; -1 for the others.
    """

    trees: Trees
    routes: Routes
    capacities: Floats
    links: int
    shared: int
    paced: Indices


_UP, _DOWN = 0, 1
"""Directions of a flow, as indices."""


class _Hops(NamedTuple):
    """The hops of one flow between each rank and its parent, up and down, as arrays [2, ranks].

    Attributes:
        route: route of each hop.
        kind: class of each hop.
        seconds: time of one piece.
        before, after: seconds from the start of the stage until a piece is at a rank, and from then to the stage's end.
        between: [2] seconds before the root sends to the second root, and after it has received from there.
    """

    route: Integers
    kind: Indices
    seconds: Floats
    before: Floats
    after: Floats
    between: Floats


@compiled
def load(
    flows: Flows,
    paths: Paths,
    classes: Indices,
    parted: Flags,
    work: Floats,
    fill: Floats,
    pairs: NDArray[numpy.uint64],
) -> None:
    """Fill in ``work`` [classes, stages, channels], ``fill`` [classes, stages] and ``pairs`` [classes, stages, words].

    They are as in `Loads`. A hop belongs to the class of the slowest rank for which it waits.

    On trees a channel is idle until the first piece reaches it and after the last piece has left it. So for every
    channel a stage takes at least the time to reach it, plus the load, plus the time from it to the end. The largest
    sum counts. With exchanges between pairs it is idle between them, too. So the first piece takes the time of its
    longest path, and each further one the load of the busiest channel.

    Args:
        flows, paths: flows of the stages, and where they travel.
        classes: [ranks] class of each rank; 0 for the slowest.
        parted: [stages] whether the hops of a stage have classes; all hops of other stages belong to class 0.
    """
    shape = 2, paths.trees.parents.shape[1]
    route, kind = numpy.zeros(shape, dtype=numpy.int32), numpy.zeros(shape, dtype=numpy.int64)
    hops = _Hops(route, kind, numpy.zeros(shape), numpy.zeros(shape), numpy.zeros(shape), numpy.zeros(2))
    lead, trail = numpy.full(work.shape, numpy.inf), numpy.full(work.shape, numpy.inf)
    path, pieces = numpy.zeros(fill.shape), numpy.zeros(fill.shape[1])
    elapsed, heard = numpy.zeros(shape[1]), numpy.zeros(shape[1], dtype=numpy.int64)
    for flow in range(len(flows.stage)):
        stage = flows.stage[flow]
        if flows.turn[flow] == 1:
            pieces[stage] += flows.copies[flow] * flows.pieces[flow]
            elapsed[:], heard[:] = 0.0, classes * parted[stage]
        _classify(flows, paths, flow, heard if flows.turn[flow] > 0 else classes, parted[stage], hops.kind)
        for way in (_UP, _DOWN):
            if _tree(flows, flow, way) >= 0:
                _copy_routes(flows, paths, flow, way, hops)
                count = _add_work(flows, paths, flow, way, hops, work, pairs)
                _time_hops(flows, paths, flow, way, hops, count)
        if flows.turn[flow] > 0:
            _time_exchange(flows, paths, flow, hops, elapsed, heard)
            for rank in range(len(elapsed)):
                path[heard[rank], stage] = max(path[heard[rank], stage], elapsed[rank])
            continue
        _time_pipeline(flows, paths, flow, hops)
        for way in (_UP, _DOWN):
            if _tree(flows, flow, way) >= 0:
                _lower_margins(flows, paths, flow, way, hops, lead, trail)
    for number in range(len(work)):
        _fill_pipelines(paths, work[number], lead[number], trail[number], path[number], pieces, fill[number])


@compiled
def _tree(flows: Flows, flow: int, way: int) -> int:
    """The tree of a flow in one direction; negative for none."""
    return int(flows.up[flow] if way == _UP else flows.down[flow])


@compiled
def _mutual(flows: Flows, flow: int) -> bool:
    """As `Flow.mutual`."""
    return bool(flows.turn[flow] > 0 and flows.up[flow] >= 0 and flows.down[flow] >= 0)


@compiled
def _classify(flows: Flows, paths: Paths, flow: int, classes: Indices, parted: bool, kind: Indices) -> None:
    """Fill in ``kind`` [2, ranks]: the class of each rank's hop up and down its trees; at roots, that of their sums.

    ``classes`` are those of the ranks; for an exchange, of the slowest rank of which each has heard.
    """
    kind[:] = 0
    if not parted:
        return
    up, down, latencies = flows.up[flow], flows.down[flow], flows.costs[flows.stage[flow], 5]
    if flows.turn[flow] > 0:
        kind[_UP] = classes
        for rank in range(len(classes)):
            kind[_DOWN, rank] = classes[paths.trees.parents[max(up, down), rank]]
        return
    kind[_UP], kind[_DOWN] = classes, classes
    if up >= 0:
        for place in range(len(classes) - 1, -1, -1):
            rank = paths.trees.order[up, place]
            parent = paths.trees.parents[up, rank]
            if parent < 0:
                kind[_DOWN, rank] = kind[_UP, rank]
                continue
            if latencies > 1:
                kind[_UP, rank] = min(kind[_UP, rank], classes[parent])
            kind[_UP, parent] = min(kind[_UP, parent], kind[_UP, rank])
    if down >= 0:
        for place in range(len(classes)):
            rank = paths.trees.order[down, place]
            parent = paths.trees.parents[down, rank]
            if parent >= 0:
                kind[_DOWN, rank] = kind[_DOWN, parent]


@compiled
def _copy_routes(flows: Flows, paths: Paths, flow: int, way: int, hops: _Hops) -> None:
    """Copy the route of each rank to or from its parent: each is used several times, and the table exceeds caches."""
    tree = _tree(flows, flow, way)
    first = paths.trees.first[tree]
    for rank in range(paths.trees.parents.shape[1]):
        parent = paths.trees.parents[tree, rank]
        if parent >= 0:
            between = paths.routes.between
            hops.route[way, rank] = between[first + rank, parent] if way == _UP else between[first + parent, rank]


@compiled
def _add_work(
    flows: Flows, paths: Paths, flow: int, way: int, hops: _Hops, work: Floats, pairs: NDArray[numpy.uint64]
) -> Floats:
    """Add one direction of a flow to the loads and pairs.

    Returns:
        [channels] the sum of shares that cross each link at about the same time: without those between two roots, which
        mostly are earlier than the others on the way down and later on the way up.
    """
    ranks, stage, tree = paths.trees.parents.shape[1], flows.stage[flow], _tree(flows, flow, way)
    count = numpy.zeros(len(paths.capacities))
    second, mutual = flows.second[flow], _mutual(flows, flow)
    gather, seal, opening, frame, _, _, meet = flows.costs[stage]
    copies = flows.copies[flow]
    wire, values = copies * flows.wire[flow], copies * flows.values[flow]
    parents, sizes, growth = paths.trees.parents[tree], paths.trees.sizes[tree], flows.growth[stage]
    starts, channels = paths.routes.starts, paths.routes.hops
    for rank in range(ranks):
        parent, own = parents[rank], work[hops.kind[way, rank], stage]
        if parent < 0:
            if way == _UP:  # a root encodes the sum once, for all its children on the way down
                own[paths.links + rank] += values * seal
                if paths.shared >= 0:
                    own[paths.shared] += values * seal
            continue
        source, target = (rank, parent) if way == _UP else (parent, rank)
        # A sum of sparse rows fills up as ranks are added: on the way up those below this hop, on the way down all.
        share = growth[sizes[rank] if way == _UP else ranks]
        route = hops.route[way, rank]
        for hop in range(starts[route], starts[route + 1]):
            own[channels[hop]] += share * wire
            count[channels[hop]] += share * (rank != second)
        handling = share * wire * flows.host_cost + copies * flows.pieces[flow] * frame
        sending = share * values * seal if way == _UP else 0.0
        receiving = share * values * (meet if mutual or rank == second else gather if way == _UP else opening)
        own[paths.links + source] += handling + sending
        own[paths.links + target] += handling + receiving
        if paths.shared >= 0:
            own[paths.shared] += 2 * handling + sending + receiving
        pair = (paths.trees.first[tree] + source) * ranks + target
        if paths.paced[pair] >= 0:
            own[paths.paced[pair]] += share * wire
        # All operands are uint64: numba converts a mix with int64 to float64.
        pairs[hops.kind[way, rank], stage, pair >> 6] |= numpy.uint64(1) << numpy.uint64(pair & 63)
    return count


@compiled
def _time_hops(flows: Flows, paths: Paths, flow: int, way: int, hops: _Hops, count: Floats) -> None:
    """Fill in the seconds of one piece from each rank to its parent, or back; ``count`` is that of `_add_work`."""
    ranks, tree = paths.trees.parents.shape[1], _tree(flows, flow, way)
    gather, seal, opening, _, hop_cost, latencies, meet = flows.costs[flows.stage[flow]]
    wire, values, pieces = flows.wire[flow], flows.values[flow], flows.pieces[flow]
    parents, sizes, growth = paths.trees.parents[tree], paths.trees.sizes[tree], flows.growth[flows.stage[flow]]
    starts, channels, capacities = paths.routes.starts, paths.routes.hops, paths.capacities
    for rank in range(ranks):
        if parents[rank] < 0:
            continue
        route, is_second = hops.route[way, rank], rank == flows.second[flow]
        slowest = 0.0
        for hop in range(starts[route], starts[route + 1]):
            together = 1.0 if is_second else count[channels[hop]]
            slowest = max(slowest, together / capacities[channels[hop]])
        share = growth[sizes[rank] if way == _UP else ranks]
        coding = meet if is_second or _mutual(flows, flow) else gather + seal if way == _UP else opening
        piece = slowest * wire + share * values * coding
        hops.seconds[way, rank] = piece / pieces + latencies * paths.routes.latencies[route] + hop_cost


@compiled
def _time_exchange(flows: Flows, paths: Paths, flow: int, hops: _Hops, elapsed: Floats, heard: Indices) -> None:
    """Add an exchange between pairs to ``elapsed`` [ranks], seconds until a piece is at a rank, and to ``heard``.

    That is [ranks] the class of the slowest rank of which each has heard. What faster classes send is there before. A
    pair goes on when both have sent, because what is left would share the links with the next exchange.
    """
    up, down = flows.up[flow], flows.down[flow]
    for rank in range(len(elapsed)):
        parent = paths.trees.parents[max(up, down), rank]
        if parent < 0:
            continue
        one, other = heard[rank], heard[parent]
        begun = max(elapsed[rank] * (one <= other), elapsed[parent] * (other <= one))
        longest = max(hops.seconds[_UP, rank] * (up >= 0), hops.seconds[_DOWN, rank] * (down >= 0))
        elapsed[rank] = elapsed[parent] = begun + longest
        heard[rank] = heard[parent] = min(one, other)


@compiled
def _time_pipeline(flows: Flows, paths: Paths, flow: int, hops: _Hops) -> None:
    """Fill in the seconds before and after each rank: a piece goes up to the root, then down.

    If there is a second root, pieces at it and at the root go on when they have come from both.
    """
    up, down, second = _tree(flows, flow, _UP), _tree(flows, flow, _DOWN), flows.second[flow]
    rising = falling = rising_there = falling_there = 0.0
    if up >= 0:
        rising = _climb(paths, up, second, hops.seconds[_UP], hops.kind[_UP], hops.before[_UP])
    if down >= 0:
        falling = _climb(paths, down, second, hops.seconds[_DOWN], hops.kind[_DOWN], hops.after[_DOWN])
    if second >= 0:
        hops.between[0], hops.between[1] = rising, falling
        there, back = hops.seconds[_DOWN, second], hops.seconds[_UP, second]
        above, below = hops.before[_UP, second], hops.after[_DOWN, second]
        rising, rising_there = max(rising, above + back), max(above, rising + there)
        falling, falling_there = max(falling, there + below), max(below, back + falling)
    if down >= 0:
        _descend(paths, down, second, hops.seconds[_DOWN], rising, rising_there, hops.before[_DOWN])
    if up >= 0:
        _descend(paths, up, second, hops.seconds[_UP], falling, falling_there, hops.after[_UP])


@compiled
def _climb(paths: Paths, tree: int, second: int, hop_time: Floats, kind: Indices, below: Floats) -> float:
    """Fill in ``below``: the longest time between each rank and the leaves below it; returns the longest of a root.

    Hops of faster classes do not count: they are over when the hop of the rank itself may begin. What is below a
    ``second`` root (-1 for none) does not count for the root.
    """
    below[:] = 0
    longest = 0.0
    for place in range(len(below) - 1, -1, -1):
        rank = paths.trees.order[tree, place]
        parent = paths.trees.parents[tree, rank]
        if parent >= 0:
            if kind[rank] == kind[parent] and rank != second:
                below[parent] = max(below[parent], below[rank] + hop_time[rank])
        else:
            longest = max(longest, below[rank])
    return longest


@compiled
def _descend(
    paths: Paths, tree: int, second: int, hop_time: Floats, beyond: float, beyond_second: float, above: Floats
) -> None:
    """Fill in ``above``: the time between each rank and its root, plus ``beyond``, for the second root its own."""
    for place in range(len(above)):
        rank = paths.trees.order[tree, place]
        parent = paths.trees.parents[tree, rank]
        if rank == second:
            above[rank] = beyond_second
        else:
            above[rank] = beyond if parent < 0 else above[parent] + hop_time[rank]


@compiled
def _lower_margins(flows: Flows, paths: Paths, flow: int, way: int, hops: _Hops, lead: Floats, trail: Floats) -> None:
    """Lower the minimal times before and after each link to those of this flow's hops."""
    stage, tree = flows.stage[flow], _tree(flows, flow, way)
    hop_cost, latencies, meet = flows.costs[stage, 4], flows.costs[stage, 5], flows.costs[stage, 6]
    before, after = hops.before[way], hops.after[way]
    for rank in range(len(before)):
        parent = paths.trees.parents[tree, rank]
        if parent < 0:
            continue
        source, target = (rank, parent) if way == _UP else (parent, rank)
        route, kind = hops.route[way, rank], hops.kind[way, rank]
        until, onwards = before[source], after[target]
        if rank == flows.second[flow]:
            until, onwards = (until, hops.between[1]) if way == _UP else (hops.between[0], onwards)
            # The sum of both roots may be the last thing that is made. Other sums and copies count in `before`.
            onwards += flows.values[flow] / flows.pieces[flow] * meet
        onwards += latencies * paths.routes.latencies[route] + hop_cost
        for hop in range(paths.routes.starts[route], paths.routes.starts[route + 1]):
            channel = paths.routes.hops[hop]
            lead[kind, stage, channel] = min(lead[kind, stage, channel], until)
            trail[kind, stage, channel] = min(trail[kind, stage, channel], onwards)


@compiled
def _fill_pipelines(
    paths: Paths, work: Floats, lead: Floats, trail: Floats, path: Floats, pieces: Floats, fill: Floats
) -> None:
    """Fill in ``fill``: seconds by which a stage's longest path exceeds the load of its busiest channel.

    ``path`` is that of a piece through all exchanges of pairs, of which there are so many ``pieces``.
    """
    for stage in range(work.shape[0]):
        busiest, longest = 0.0, 0.0
        for channel in range(len(paths.capacities)):
            if work[stage, channel] > 0:
                load = work[stage, channel] / paths.capacities[channel]
                busiest = max(busiest, load)
                if channel < paths.links:
                    longest = max(longest, lead[stage, channel] + load + trail[stage, channel])
        if pieces[stage] > 0:
            longest = path[stage] + busiest * (1 - 1 / pieces[stage])
        fill[stage] = max(0.0, longest - busiest)
