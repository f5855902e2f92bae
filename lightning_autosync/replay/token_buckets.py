"""Token buckets: a channel that was idle passes its next bytes at once, as shaped links do (``tc tbf``).

A bucket fills with the unused capacity of its channel, up to a burst. While it is not empty, its channel is as fast as
memory.
"""

from __future__ import annotations

import numpy

from lightning_autosync.replay.compiled import compiled
from lightning_autosync.replay.network import Floats

_AT_ONCE = 20e9
"""Bytes/s of a channel with tokens: the speed of memory, because emulated links are copies in memory."""
_EMPTY = 1.0
"""Tokens (bytes) up to which a bucket counts as empty."""
_SAME = 1 + 1e-9
"""Ratio up to which two rates count as equal."""


@compiled
def open_capacities(capacities: Floats, tokens: Floats) -> Floats:
    """[channels] current bytes/s of each channel."""
    effective = capacities.copy()
    for channel in range(len(tokens)):
        if tokens[channel] > _EMPTY:
            effective[channel] = max(_AT_ONCE, capacities[channel])
    return effective


@compiled
def next_change(flow: Floats, capacities: Floats, tokens: Floats) -> float:
    """Seconds until the next bucket is empty at ``flow`` [channels], in bytes/s; infinite if none will be."""
    least = numpy.inf
    for channel in range(len(tokens)):
        if tokens[channel] > _EMPTY and flow[channel] > capacities[channel] * _SAME:
            least = min(least, tokens[channel] / (flow[channel] - capacities[channel]))
    return least


@compiled
def refill(flow: Floats, capacities: Floats, tokens: Floats, burst: Floats, seconds: float) -> None:
    """Update ``tokens`` in place after ``seconds`` at ``flow`` [channels], in bytes/s."""
    for channel in range(len(tokens)):
        if burst[channel] > 0:
            there = tokens[channel] + (capacities[channel] - flow[channel]) * seconds
            tokens[channel] = 0.0 if there < _EMPTY else min(there, burst[channel])
