"""Event simulation of frames on connections.

A connection sends one frame at a time. Connections share channels max-min fairly. A connection with a pace sends in
bursts, as Linux does: a burst leaves as fast as the channels allow, and the next one waits until the pace allows it.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from lightning_autosync.replay.compiled import compiled
from lightning_autosync.replay.network import Floats, Indices, Routes
from lightning_autosync.replay.token_buckets import next_change, open_capacities, refill
from lightning_autosync.replay.windows import Windows, window_room

_ROUNDING = 1e-12
"""Share of a quantity that rounding may add or take away. So much of a channel always counts as free."""
_MOST_BURSTS = 16
"""Most bursts of one frame; large frames leave in larger bursts, which keeps the simulation fast."""
# Times are sums of many steps, so simultaneous events differ by rounding.
_EPSILON = 1e-12
"""Seconds within which two events count as simultaneous."""


class Nodes(NamedTuple):
    """Frames and points in time, as arrays [nodes].

    Attributes:
        connection: connection that carries the frame; -1 for a point in time.
        size: bytes of the frame.
        key: urgency on the connection: lowest first, then first come, first served. The kernel sends what it has
            taken over in the order in which it did so.
        cost: core-seconds at each end.
        after: seconds from arrival to completion.
        release: earliest time in seconds; used for points in time only.
    """

    connection: Indices
    size: Floats
    key: Floats
    cost: Floats
    after: Floats
    release: Floats


class Dependencies(NamedTuple):
    """Which node waits for which.

    Attributes:
        waits: [nodes] number of nodes that a node waits for.
        offsets, successors: node ``n`` is awaited by ``successors[offsets[n] : offsets[n + 1]]``.
        gates: [collectives] nodes that each take one of the backend's ``places``, in this order.
        ends: [collectives] nodes that each free one of the places.
        places: number of collectives that the backend runs at once.
    """

    waits: Indices
    offsets: Indices
    successors: Indices
    gates: Indices
    ends: Indices
    places: int


class FrameConnections(NamedTuple):
    """Connections between ranks.

    Attributes:
        source, target: [connections] ranks.
        route: [connections] index into ``routes``.
        pace: [connections] most bytes/s that the sender gives the connection; infinite without a limit.
        burst: [connections] bytes that a connection with a pace sends at once; infinite without a pace.
        unsent: [connections] bytes that the kernel takes over ahead.
        round_trip: [connections] seconds; 0 for connections whose congestion windows never limit them.
        hosts: channel index of the first host.
        shared: channel index of the shared cores; -1 for none.
    """

    source: Indices
    target: Indices
    route: Indices
    pace: Floats
    burst: Floats
    routes: Routes
    unsent: Floats
    round_trip: Floats
    hosts: int
    shared: int


class _State(NamedTuple):
    """State of the simulation.

    Attributes:
        missing: [nodes] number of nodes that a node still waits for.
        ready: [nodes] nodes that wait for no other, in the order in which they became ready.
        frees: [nodes] whether the end of a node frees a place in the backend.
        arrival: [nodes] position in the arrival order of queued frames.
        following: [nodes] next frame in a list of frames; -1 at its end. A frame is in one of the next two lists.
        head: [connections] first of the queued frames, which are in no order; -1 for none.
        first, last: [connections] first and last of the frames that the kernel has taken over, in the order in which
            they leave; ``first`` is -1 for none.
        unsent: [connections] bytes of those frames, without those that have left or are leaving in the present burst.
        current: [connections] frame that is being sent: the first one, or -1 for none.
        left: [connections] bytes of the burst that is being sent.
        rest: [connections] bytes of the first frame after that burst.
        free: [connections] time from which the pace allows another burst.
        rate: [connections] bytes/s.
        sending: [connections] whether the connection counted as sending when rates were last computed.
        per_byte: [connections] core-seconds per byte at each end.
        counts: [3] counters, indexed by the constants below.
    """

    missing: Indices
    ready: Indices
    frees: NDArray[numpy.bool_]
    arrival: Indices
    following: Indices
    head: Indices
    first: Indices
    last: Indices
    unsent: Floats
    current: Indices
    left: Floats
    rest: Floats
    free: Floats
    rate: Floats
    sending: NDArray[numpy.bool_]
    per_byte: Floats
    counts: Indices


class _Demands(NamedTuple):
    """What each connection takes of channels.

    Attributes:
        starts: [connections + 1] offset of each connection in the next two arrays.
        channels: the hops of its route, then the hosts of its ends, and the shared cores if there are any.
        amounts: what a byte takes of that channel: 1 of a hop, core-seconds of hosts and cores.
        hosts: number of the last channels of each connection that are hosts and cores.
    """

    starts: Indices
    channels: Indices
    amounts: Floats
    hosts: int


_READY = 0
"""Index in ``_State.counts``: number of nodes that became ready."""
_TAKEN = 1
"""Index in ``_State.counts``: number of ready nodes that were processed."""
_OPENED = 2
"""Index in ``_State.counts``: number of open gates."""


@compiled
def simulate(
    nodes: Nodes,
    graph: Dependencies,
    connections: FrameConnections,
    windows: Windows,
    capacities: Floats,
    tokens: Floats,
    burst: Floats,
) -> tuple[Floats, Floats, Floats]:
    """Run a graph of frames and points in time; ``tokens`` and ``burst`` are those of `fluid.drain`.

    ``windows`` are updated in place.

    Returns:
        Three arrays [nodes] in seconds: when each node was first served, when its last byte left (both infinite for
        points in time), and when it was done.
    """
    count = len(nodes.connection)
    begun, sent, done = numpy.full(count, numpy.inf), numpy.full(count, numpy.inf), numpy.full(count, numpy.inf)
    state, demands = _begin(graph, count, len(connections.route)), _demands(connections)
    # numba cannot infer the type of an empty list, so start from one with an event and drop that.
    events = [(0.0, -1)]
    heapq.heappop(events)
    for node in range(count):
        if state.missing[node] == 0:
            _enqueue_ready(node, state)
    for number in range(len(connections.route)):
        if connections.round_trip[number] > 0:
            _wait_for_window(connections, windows, state, number)
    while state.counts[_OPENED] < min(graph.places, len(graph.gates)):
        _open_gate(graph, state)
    effective, shaped = capacities, burst.max() > 0
    flow = capacities
    now = 0.0
    while True:
        _finish_due(nodes, graph, state, events, done, now)
        changed = _start_bursts(nodes, connections, demands, windows, state, begun, now)
        if shaped:
            current = open_capacities(capacities, tokens)
            changed = changed or not numpy.array_equal(current, effective)
            effective = current
        if changed:
            _set_rates(demands, state.current, state.rate, effective)
        step = events[0][0] - now if len(events) > 0 else numpy.inf
        for number in range(len(connections.route)):
            if state.current[number] >= 0:
                step = min(step, state.left[number] / state.rate[number])
            elif state.first[number] >= 0:
                step = min(step, state.free[number] - now)
        if step == numpy.inf:
            return begun, sent, done
        if shaped:
            flow = _flow(demands, state.current, state.rate, len(capacities))
            step = min(step, next_change(flow, capacities, tokens))
            refill(flow, capacities, tokens, burst, step)
        now += step
        for number in range(len(connections.route)):
            if state.current[number] < 0:
                continue
            state.left[number] -= state.rate[number] * step
            if state.left[number] <= state.rate[number] * _EPSILON:
                node = state.current[number]
                state.current[number] = -1
                windows.sent[number] = now
                if state.rest[number] > 0:
                    continue
                sent[node] = now
                state.first[number] = state.following[node]
                heapq.heappush(
                    events,
                    (now + connections.routes.latencies[connections.route[number]] + nodes.after[node], node),
                )


@compiled
def _begin(graph: Dependencies, count: int, connections: int) -> _State:
    missing, frees = graph.waits.copy(), numpy.zeros(count, dtype=numpy.bool_)
    for index in range(len(graph.gates)):
        missing[graph.gates[index]] += 1  # a gate also waits for a place in the backend; see `_open_gate`
        frees[graph.ends[index]] = True
    return _State(
        missing,
        numpy.zeros(count, dtype=numpy.int64),
        frees,
        numpy.zeros(count, dtype=numpy.int64),
        numpy.full(count, -1, dtype=numpy.int64),
        numpy.full(connections, -1, dtype=numpy.int64),
        numpy.full(connections, -1, dtype=numpy.int64),
        numpy.full(connections, -1, dtype=numpy.int64),
        numpy.zeros(connections),
        numpy.full(connections, -1, dtype=numpy.int64),
        numpy.zeros(connections),
        numpy.zeros(connections),
        numpy.zeros(connections),
        numpy.zeros(connections),
        numpy.zeros(connections, dtype=numpy.bool_),
        numpy.zeros(connections),
        numpy.zeros(3, dtype=numpy.int64),
    )


@compiled
def _enqueue_ready(node: int, state: _State) -> None:
    state.ready[state.counts[_READY]] = node
    state.counts[_READY] += 1


@compiled
def _wait_less(node: int, state: _State) -> None:
    """Lower the number of nodes that a node waits for, and queue the node if none is left."""
    state.missing[node] -= 1
    if state.missing[node] == 0:
        _enqueue_ready(node, state)


@compiled
def _open_gate(graph: Dependencies, state: _State) -> None:
    """Give the next gate a place in the backend."""
    state.counts[_OPENED] += 1
    _wait_less(graph.gates[state.counts[_OPENED] - 1], state)


@compiled
def _finish_due(
    nodes: Nodes, graph: Dependencies, state: _State, events: list[tuple[float, int]], done: Floats, now: float
) -> None:
    """Queue ready frames on their connections and finish what is due, until nothing more follows."""
    while True:
        while state.counts[_TAKEN] < state.counts[_READY]:
            node = state.ready[state.counts[_TAKEN]]
            state.counts[_TAKEN] += 1
            number = nodes.connection[node]
            if number < 0:
                heapq.heappush(events, (max(now, nodes.release[node]) + nodes.after[node], node))
            else:
                state.arrival[node] = state.counts[_TAKEN]  # frames of equal urgency leave in this order
                state.following[node] = state.head[number]
                state.head[number] = node
        if len(events) == 0 or events[0][0] > now + _EPSILON:
            return
        _, node = heapq.heappop(events)
        done[node] = now
        for edge in range(graph.offsets[node], graph.offsets[node + 1]):
            _wait_less(graph.successors[edge], state)
        if state.frees[node] and state.counts[_OPENED] < len(graph.gates):
            _open_gate(graph, state)


@compiled
def _start_bursts(
    nodes: Nodes,
    connections: FrameConnections,
    demands: _Demands,
    windows: Windows,
    state: _State,
    begun: Floats,
    now: float,
) -> bool:
    """Let idle connections send their next bursts; returns whether the demands on channels have changed."""
    changed = False
    for number in range(len(state.current)):
        # A call costs more than the rest of this loop, because numba counts the references of all arrays.
        if state.head[number] >= 0 and (state.first[number] < 0 or state.unsent[number] < connections.unsent[number]):
            _take_over(nodes, connections, state, number)
        if state.current[number] >= 0:
            continue
        node = state.first[number]
        if node >= 0 and state.free[number] <= now + _EPSILON:
            if begun[node] == numpy.inf:
                state.rest[number], begun[node] = nodes.size[node], now
            burst = max(connections.burst[number], nodes.size[node] / _MOST_BURSTS)
            if connections.round_trip[number] > 0:
                burst = min(burst, window_room(windows, number, connections.round_trip[number], now))
            # Rounding must not leave a rest that would wait for the pace.
            whole = state.rest[number] <= burst * (1 + _ROUNDING)
            state.current[number], state.left[number] = node, state.rest[number] if whole else burst
            state.rest[number] = 0.0 if whole else state.rest[number] - burst
            state.unsent[number] -= state.left[number]
            _take_over(nodes, connections, state, number)
            gap = state.left[number] / connections.pace[number]
            # A connection that could have sent before makes up for that time, up to half of the gap.
            state.free[number] = now + max(gap / 2, gap - (now - state.free[number]))
            if connections.round_trip[number] > 0:
                windows.used[number] += state.left[number]
                _wait_for_window(connections, windows, state, number)
            per_byte = nodes.cost[node] / nodes.size[node] if nodes.size[node] > 0 else 0.0
            # A frame like the one before it keeps the connection's rate. This saves most computations of rates.
            if state.per_byte[number] != per_byte:
                state.per_byte[number], changed = per_byte, True
                _set_cost(demands, number, per_byte)
            changed = changed or not state.sending[number]
            state.sending[number] = True
        elif state.sending[number]:
            state.sending[number] = False
            changed = True
    return changed


@compiled
def _wait_for_window(connections: FrameConnections, windows: Windows, state: _State, number: int) -> None:
    """Let a connection whose window is used up wait for the acknowledgement."""
    if windows.used[number] >= windows.size[number]:
        acknowledged = windows.begun[number] + connections.round_trip[number]
        state.free[number] = max(state.free[number], acknowledged)


@compiled
def _take_over(nodes: Nodes, connections: FrameConnections, state: _State, number: int) -> None:
    """Let the kernel take over the most urgent frames of a connection, as long as it has room."""
    while state.head[number] >= 0 and (state.first[number] < 0 or state.unsent[number] < connections.unsent[number]):
        node = _next_frame(number, state.head, state.following, nodes.key, state.arrival)
        state.following[node] = -1
        if state.first[number] < 0:
            state.first[number] = node
        else:
            state.following[state.last[number]] = node
        state.last[number] = node
        state.unsent[number] += nodes.size[node]


@compiled
def _next_frame(number: int, head: Indices, following: Indices, key: Floats, arrival: Indices) -> int:
    """Remove the most urgent frame from a connection's queue and return it."""
    best, before_best, before = head[number], -1, -1
    node = head[number]
    while node >= 0:
        if key[node] < key[best] or (key[node] == key[best] and arrival[node] < arrival[best]):
            best, before_best = node, before
        before, node = node, following[node]
    if before_best < 0:
        head[number] = following[best]
    else:
        following[before_best] = following[best]
    return int(best)


@compiled
def _demands(connections: FrameConnections) -> _Demands:
    """The demands of all connections, of which none costs core time yet."""
    known = connections.routes
    count, hosts = len(connections.route), 2 if connections.shared < 0 else 3
    starts = numpy.zeros(count + 1, dtype=numpy.int64)
    for number in range(count):
        route = connections.route[number]
        starts[number + 1] = starts[number] + known.starts[route + 1] - known.starts[route] + hosts
    channels, amounts = numpy.zeros(starts[-1], dtype=numpy.int64), numpy.zeros(starts[-1])
    for number in range(count):
        route, place = connections.route[number], starts[number]
        for hop in range(known.starts[route], known.starts[route + 1]):
            channels[place], amounts[place] = known.hops[hop], 1.0
            place += 1
        channels[place] = connections.hosts + connections.source[number]
        channels[place + 1] = connections.hosts + connections.target[number]
        if connections.shared >= 0:
            channels[place + 2] = connections.shared
    return _Demands(starts, channels, amounts, hosts)


@compiled
def _set_cost(demands: _Demands, number: int, per_byte: float) -> None:
    """Set the core-seconds that a connection costs each end per byte."""
    place = demands.starts[number + 1] - demands.hosts
    demands.amounts[place : place + 2] = per_byte
    if demands.hosts > 2:
        demands.amounts[place + 2] = 2 * per_byte  # both ends of the connection run on the shared cores


@compiled
def _set_rates(demands: _Demands, current: Indices, rate: Floats, capacities: Floats) -> None:
    """Max-min fair rates by progressive filling: all grow together until a channel is full.

    Args:
        demands: the demands of the connections on channels.
        current, rate: those of `_State`. Rates are those of connections that send.
        capacities: [channels] bytes/s or cores.
    """
    starts, channels, amounts, _ = demands
    residual, load = capacities.copy(), numpy.zeros(len(capacities))
    growing = numpy.empty(len(current), dtype=numpy.int64)
    count = 0
    for number in range(len(current)):
        if current[number] >= 0:
            growing[count] = number
            count += 1
            for place in range(starts[number], starts[number + 1]):
                load[channels[place]] += amounts[place]
    fixed = numpy.empty(count, dtype=numpy.int64)
    while count:
        least = numpy.inf
        for channel in range(len(load)):
            # Rounding may leave a negative residual; without a minimum no connection would ever move again.
            room = max(residual[channel], capacities[channel] * _ROUNDING)
            if load[channel] > 1e-18 and room < least * load[channel]:
                least = room / load[channel]
        enough = least * (1 + 1e-9)
        left, done = 0, 0
        for index in range(count):
            number = growing[index]
            full = least == numpy.inf
            for place in range(starts[number], starts[number + 1]):
                channel = channels[place]
                if amounts[place] > 0 and residual[channel] <= enough * load[channel]:
                    full = True
                    break
            if full:
                fixed[done] = number
                done += 1
            else:
                growing[left] = number
                left += 1
        count = left
        for index in range(done):
            number = fixed[index]
            # Finite, because an infinite rate times 0 seconds is NaN.
            rate[number] = min(least, 1e30)
            for place in range(starts[number], starts[number + 1]):
                load[channels[place]] -= amounts[place]
                residual[channels[place]] -= rate[number] * amounts[place]
        if done == 0:
            # If costs differ by many orders of magnitude, subtraction leaves a rounding residue on channels that no
            # growing connection uses. Recompute the loads, or this loop would never end.
            load[:] = 0.0
            for number in growing[:count]:
                for place in range(starts[number], starts[number + 1]):
                    load[channels[place]] += amounts[place]


@compiled
def _flow(demands: _Demands, current: Indices, rate: Floats, channels: int) -> Floats:
    """[channels] total use per second by all connections."""
    flow = numpy.zeros(channels)
    for number in range(len(current)):
        if current[number] >= 0:
            for place in range(demands.starts[number], demands.starts[number + 1]):
                flow[demands.channels[place]] += rate[number] * demands.amounts[place]
    return flow
