"""Token buckets: a channel that was idle gives its next bytes at once, as shaped links do (``tc tbf``).

A bucket fills with what its channel could have given and did not, up to a burst. While there is something in it, the
channel is as fast as asked for.
"""

from __future__ import annotations

import numba
import numpy

from lightning_autosync.replay.network import Floats

_AT_ONCE = 20e9
"""Bytes/s of what a bucket lets pass: that of memory, which is what links made of memory carry."""
_EMPTY = 1.0
"""Tokens (bytes) that do not count."""
_SAME = 1 + 1e-9
"""Ratio of two rates that are one."""


@numba.njit(cache=True)
def open_capacities(capacities: Floats, tokens: Floats) -> Floats:
    """[channels] bytes/s of each channel at this moment."""
    effective = capacities.copy()
    for channel in range(len(tokens)):
        if tokens[channel] > _EMPTY:
            effective[channel] = max(_AT_ONCE, capacities[channel])
    return effective


@numba.njit(cache=True)
def next_change(flow: Floats, capacities: Floats, tokens: Floats) -> float:
    """Seconds until the next bucket is empty at a ``flow`` [channels, bytes/s]; infinite if none will be."""
    least = numpy.inf
    for channel in range(len(tokens)):
        if tokens[channel] > _EMPTY and flow[channel] > capacities[channel] * _SAME:
            least = min(least, tokens[channel] / (flow[channel] - capacities[channel]))
    return least


@numba.njit(cache=True)
def refill(flow: Floats, capacities: Floats, tokens: Floats, burst: Floats, seconds: float) -> None:
    """Update ``tokens`` for ``seconds`` at a given flow."""
    for channel in range(len(tokens)):
        if burst[channel] > 0:
            there = tokens[channel] + (capacities[channel] - flow[channel]) * seconds
            tokens[channel] = 0.0 if there < _EMPTY else min(there, burst[channel])
