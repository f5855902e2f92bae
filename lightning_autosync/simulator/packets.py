"""Frames over connections: one at a time on each, connections sharing channels max-min fairly."""

from __future__ import annotations

import heapq

import numba
import numpy
from numpy.typing import NDArray

from lightning_autosync.simulator.network import Floats, Integers

Indices = NDArray[numpy.int64]

_EPSILON = 1e-12
"""Seconds between two events that are one."""


@numba.njit(cache=True)
def move(
    nodes: tuple[Indices, Floats, Floats, Floats, Floats, Floats],
    graph: tuple[Indices, Indices, Indices],
    connections: tuple[Indices, Indices, Indices],
    routes: tuple[Integers, Integers, Floats],
    channels: tuple[Floats, int, int],
    queue: tuple[Indices, Indices, int],
) -> tuple[Floats, Floats, Floats]:
    """Run a graph of frames and points in time.

    Args:
        nodes: [nodes] connection (-1: a point in time), bytes, key (lowest first on a connection, then first come),
            core-seconds at either end, seconds from arrival to done, earliest time.
        graph: how many nodes each waits for; and its successors, by offset.
        connections: [connections] source rank, target rank, route.
        routes: channels of the routes by offset, and latencies.
        channels: capacities, index of the first host, index of the shared cores (-1: none).
        queue: nodes that wait for a place in the backend, nodes that free one, and the number of places.

    Returns:
        When each node was first served, when its last byte left (infinite for points), and when it was done.
    """
    connection, size, key, cost, after, release = nodes
    waits, offsets, successors = graph
    sources, targets, route = connections
    starts, hops, latencies = routes
    capacities, hosts, shared = channels
    gates, ends, places = queue
    count, lines = len(connection), len(route)
    begun, sent, done = (
        numpy.full(count, numpy.inf),
        numpy.full(count, numpy.inf),
        numpy.full(count, numpy.inf),
    )
    missing = waits.copy()
    frees = numpy.zeros(count, dtype=numpy.bool_)
    for index in range(len(gates)):
        missing[gates[index]] += 1
        frees[ends[index]] = True
    opened = 0
    current = numpy.full(lines, -1, dtype=numpy.int64)
    left, rate = numpy.zeros(lines), numpy.zeros(lines)
    head = numpy.full(lines, -1, dtype=numpy.int64)
    following = numpy.full(count, -1, dtype=numpy.int64)
    arrival = numpy.zeros(count, dtype=numpy.int64)
    arrivals = 0
    weight = numpy.zeros((lines, 2))
    events = [(0.0, -1)]
    heapq.heappop(events)
    ready, taken = [0], 1  # first come, first served
    for node in range(count):
        if missing[node] == 0:
            ready.append(node)
    while opened < min(places, len(gates)):
        missing[gates[opened]] -= 1
        if missing[gates[opened]] == 0:
            ready.append(gates[opened])
        opened += 1
    now = 0.0
    while True:
        changed = False
        while taken < len(ready) or (len(events) > 0 and events[0][0] <= now + _EPSILON):
            while taken < len(ready):
                node = ready[taken]
                taken += 1
                if connection[node] < 0:
                    heapq.heappush(events, (max(now, release[node]) + after[node], node))
                    continue
                arrivals += 1
                arrival[node] = arrivals
                following[node] = head[connection[node]]
                head[connection[node]] = node
            while len(events) > 0 and events[0][0] <= now + _EPSILON:
                _, node = heapq.heappop(events)
                done[node] = now
                for edge in range(offsets[node], offsets[node + 1]):
                    missing[successors[edge]] -= 1
                    if missing[successors[edge]] == 0:
                        ready.append(successors[edge])
                if frees[node] and opened < len(gates):
                    missing[gates[opened]] -= 1
                    if missing[gates[opened]] == 0:
                        ready.append(gates[opened])
                    opened += 1
        for line in range(lines):
            if current[line] >= 0 or head[line] < 0:
                continue
            node = _take(line, head, following, key, arrival)
            current[line], left[line], begun[node] = node, size[node], now
            per_byte = cost[node] / size[node] if size[node] > 0 else 0.0
            if weight[line, 0] == 0 or weight[line, 1] != per_byte:
                changed = True
            weight[line, 0], weight[line, 1] = 1.0, per_byte
        for line in range(lines):
            if current[line] < 0 and weight[line, 0] > 0:
                weight[line, 0] = 0.0
                changed = True
        if changed:
            _fill(current, weight, sources, targets, route, starts, hops, capacities, hosts, shared, rate)
        step = events[0][0] - now if len(events) > 0 else numpy.inf
        for line in range(lines):
            if current[line] >= 0:
                step = min(step, left[line] / rate[line])
        if step == numpy.inf:
            return begun, sent, done
        now += step
        for line in range(lines):
            if current[line] < 0:
                continue
            left[line] -= rate[line] * step
            if left[line] <= rate[line] * _EPSILON:
                node = current[line]
                current[line], sent[node] = -1, now
                heapq.heappush(events, (now + latencies[route[line]] + after[node], node))


@numba.njit(cache=True)
def _take(line: int, head: Indices, following: Indices, key: Floats, arrival: Indices) -> int:
    """Take the most urgent frame out of a connection's line."""
    best, before_best, before = head[line], -1, -1
    node = head[line]
    while node >= 0:
        if key[node] < key[best] or (key[node] == key[best] and arrival[node] < arrival[best]):
            best, before_best = node, before
        before, node = node, following[node]
    if before_best < 0:
        head[line] = following[best]
    else:
        following[before_best] = following[best]
    return int(best)


@numba.njit(cache=True)
def _fill(
    current: Indices,
    weight: Floats,
    sources: Indices,
    targets: Indices,
    route: Indices,
    starts: Integers,
    hops: Integers,
    capacities: Floats,
    hosts: int,
    shared: int,
    rate: Floats,
) -> None:
    """Progressive filling: all rates grow together; those on a channel that is full stay as they are."""
    lines = len(current)
    residual, load = capacities.copy(), numpy.zeros(len(capacities))
    growing = 0
    for line in range(lines):
        if current[line] >= 0:
            rate[line] = -1.0
            growing += 1
            _add(line, 1.0, weight, sources, targets, route, starts, hops, hosts, shared, load)
    while growing:
        least = numpy.inf
        for channel in range(len(load)):
            if load[channel] > 1e-18 and residual[channel] < least * load[channel]:
                least = residual[channel] / load[channel]
        for line in range(lines):
            if current[line] < 0 or rate[line] >= 0:
                continue
            full = least == numpy.inf
            for hop in range(starts[route[line]], starts[route[line] + 1]):
                channel = hops[hop]
                full = full or residual[channel] <= least * load[channel] * (1 + 1e-9)
            if weight[line, 1] > 0:
                for channel in (hosts + sources[line], hosts + targets[line], shared):
                    full = full or (channel >= 0 and residual[channel] <= least * load[channel] * (1 + 1e-9))
            if full:
                rate[line] = -2.0
        for line in range(lines):
            if current[line] >= 0 and rate[line] == -2.0:
                rate[line] = min(least, 1e30)
                growing -= 1
                _add(line, -1.0, weight, sources, targets, route, starts, hops, hosts, shared, load)
                _add(line, -rate[line], weight, sources, targets, route, starts, hops, hosts, shared, residual)


@numba.njit(cache=True)
def _add(
    line: int,
    factor: float,
    weight: Floats,
    sources: Indices,
    targets: Indices,
    route: Indices,
    starts: Integers,
    hops: Integers,
    hosts: int,
    shared: int,
    to: Floats,
) -> None:
    """Add what a connection asks of its channels at a rate of ``factor`` bytes/s."""
    for hop in range(starts[route[line]], starts[route[line] + 1]):
        to[hops[hop]] += factor
    to[hosts + sources[line]] += factor * weight[line, 1]
    to[hosts + targets[line]] += factor * weight[line, 1]
    if shared >= 0:
        to[shared] += 2 * factor * weight[line, 1]
