"""gloo's notices around a ring: before which pieces they wait in the queues of shaped links.

A rank sends a piece only after a notice that its receiver is ready for it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy

from lightning_autosync.replay.network import Floats, Indices, NetworkArrays

_OWN_QUEUE = 4e-3
"""Seconds of data that Linux lets a connection put into the queue of its own port: 1 ms at the connection's pacing
rate. That is twice the rate of its window, which is up to twice as large as what is under way."""


class NoticeQueue(NamedTuple):
    """A queue of a shaped link in which a notice waits.

    Attributes:
        sender: rank whose data stands in it.
        max_piece: largest piece, in bytes, that a notice in this queue holds up. For a larger one, the queue holds too
            little data to keep its notice waiting for long.
    """

    sender: int
    max_piece: float


def notice_queues(network: NetworkArrays, way: int) -> list[list[NoticeQueue]]:
    """For each rank around a ring, the queues of the notice that lets it send, in which the notice waits behind data.

    In gloo, a rank sends a piece only after a notice that its receiver is ready. Around a ring, notices travel against
    the data, so a notice shares links with the data of other ranks. A shaped link has one queue for both. Where a fast
    node sends to a slow one, its whole window of data stands before the slow link, and notices that cross this link
    come late. A connection's data stands before the most loaded shaped link of its route.

    Args:
        way: direction of the data, as in `Stage.ring_way`.
    """
    ranks = network.ranks
    if ranks == 1 or not network.burst.any():
        return [[] for _ in range(ranks)]
    sources = numpy.arange(ranks)
    targets = (sources + way) % ranks
    network.find_routes(numpy.unique(numpy.concatenate([sources * ranks + targets, targets * ranks + sources])))
    pairs = list(zip(sources.tolist(), targets.tolist(), strict=True))
    there = [_shaped(network, source, target) for source, target in pairs]
    back = [_shaped(network, target, source) for source, target in pairs]
    busy = numpy.zeros(len(network.capacities))
    for channels in there:
        busy[channels] += 1 / network.capacities[channels]
    standing: dict[int, list[NoticeQueue]] = {}
    for rank, channels in enumerate(there):
        if len(channels):
            full = _most_loaded(channels, busy)
            max_piece = _OWN_QUEUE / float(busy[full]) if full == channels[0] else math.inf
            standing.setdefault(full, []).append(NoticeQueue(rank, max_piece))
    return [
        list(dict.fromkeys(queue for channel in channels.tolist() for queue in standing.get(channel, [])))
        for channels in back
    ]


def _shaped(network: NetworkArrays, source: int, target: int) -> Indices:
    """The shaped channels of a route in their order."""
    known = network.routes
    route = known.between[source, target]
    hops = known.hops[known.starts[route] : known.starts[route + 1]].astype(numpy.int64)
    return hops[network.burst[hops] > 0]


def _most_loaded(channels: Indices, busy: Floats) -> int:
    return int(channels[numpy.argmax(busy[channels])])
