"""Stages as fluids: each drains its loads from all channels at one pace; stages share channels by urgency."""

from __future__ import annotations

import numba
import numpy
from numpy.typing import NDArray

from lightning_autosync.simulator.network import Floats

Flags = NDArray[numpy.bool_]
Indices = NDArray[numpy.int64]

_DONE = 1e-9
"""Share of a stage's work that is rounding."""


@numba.njit(cache=True)
def drain(
    work: Floats,
    fill: Floats,
    capacities: Floats,
    release: Floats,
    delay: Floats,
    after: Indices,
    urgency: Indices,
    queue: Indices,
    slots: int,
    rivals: Flags,
) -> tuple[Floats, Floats, Floats, Floats, Indices]:
    """Run all stages.

    Args:
        work: [stages, channels] what a stage asks of each channel.
        fill: [stages] seconds from the end of its work to its own end.
        capacities: [channels] what a channel gives a second.
        release: [stages] earliest start.
        delay: [stages] seconds between all conditions for a start and the start.
        after: [stages, 2] stages to wait for, -1 for none; the second one's start, the first one's end.
        urgency: [stages] the lower goes first among rivals.
        queue: [stages] place in the backend's queue, -1 for stages that the backend does not carry.
        slots: how many of the backend's stages run at once.
        rivals: [stages, stages] whether two stages share a connection, on which the more urgent goes first.

    Returns:
        Start, first time served, end of work, end, and the channel that bound each stage when it last moved (-1: none).
    """
    stages, channels = work.shape
    start, served = numpy.full(stages, numpy.inf), numpy.full(stages, numpy.inf)
    drained, end = numpy.full(stages, numpy.inf), numpy.full(stages, numpy.inf)
    bound = numpy.full(stages, -1, dtype=numpy.int64)
    left = numpy.ones(stages)
    alone = numpy.zeros(stages)
    for stage in range(stages):
        for channel in range(channels):
            alone[stage] = max(alone[stage], work[stage, channel] / capacities[channel])
    level = numpy.zeros(stages, dtype=numpy.int64)
    rate = numpy.zeros(stages)
    by_urgency = numpy.argsort(urgency)
    now = 0.0
    while True:
        # Conditions of a start; what starts now may let others start at once.
        coming = numpy.inf
        changed = True
        while changed:
            changed = False
            coming = numpy.inf
            for stage in range(stages):
                if end[stage] < numpy.inf and end[stage] > now:
                    coming = min(coming, end[stage])
                if start[stage] < numpy.inf:
                    if start[stage] > now:
                        coming = min(coming, start[stage])
                    elif drained[stage] == numpy.inf and (left[stage] <= _DONE or alone[stage] == 0):
                        drained[stage] = now
                        served[stage] = min(served[stage], now)
                        end[stage] = now + fill[stage]
                        changed = True
                    continue
                if release[stage] > now:
                    coming = min(coming, release[stage])
                    continue
                first, second = after[stage]
                if first >= 0 and end[first] > now:
                    continue
                if second >= 0 and start[second] > now:
                    continue
                if queue[stage] >= 0:
                    open_before = 0
                    for other in range(stages):
                        if 0 <= queue[other] < queue[stage] and end[other] > now:
                            open_before += 1
                    if open_before >= slots:
                        continue
                start[stage] = now + delay[stage]
                changed = True
        # Levels: a stage waits on shared connections for its more urgent rivals.
        deepest = -1
        for place in range(stages):
            stage = by_urgency[place]
            level[stage] = -1
            if start[stage] > now or drained[stage] < numpy.inf:
                continue
            level[stage] = 0
            for earlier in range(place):
                other = by_urgency[earlier]
                if level[other] >= level[stage] and rivals[stage, other]:
                    level[stage] = level[other] + 1
            deepest = max(deepest, level[stage])
        _share(work, capacities, alone, level, deepest, rate, bound)
        step = coming - now
        for stage in range(stages):
            if level[stage] >= 0 and rate[stage] > 0:
                step = min(step, left[stage] / rate[stage])
                served[stage] = min(served[stage], now)
        if step == numpy.inf:
            return start, served, drained, end, bound
        now = coming if now + step >= coming else now + step
        for stage in range(stages):
            if level[stage] >= 0:
                left[stage] = max(0.0, left[stage] - rate[stage] * step)


@numba.njit(cache=True)
def _share(
    work: Floats,
    capacities: Floats,
    alone: Floats,
    level: Indices,
    deepest: int,
    rate: Floats,
    bound: Indices,
) -> None:
    """Progressive filling, level by level: stages of one level grow in step, each by its own speed when alone."""
    stages, channels = work.shape
    residual = capacities.copy()
    weight = numpy.zeros(channels)
    for current in range(deepest + 1):
        growing = 0
        for stage in range(stages):
            if level[stage] == current:
                rate[stage] = -1.0
                growing += 1
        while growing:
            weight[:] = 0
            for stage in range(stages):
                if level[stage] == current and rate[stage] < 0:
                    for channel in range(channels):
                        weight[channel] += work[stage, channel] / alone[stage]
            least, tightest = numpy.inf, -1
            for channel in range(channels):
                if weight[channel] > 0 and residual[channel] < least * weight[channel]:
                    least, tightest = residual[channel] / weight[channel], channel
            for stage in range(stages):
                if level[stage] == current and rate[stage] < 0 and work[stage, tightest] > 0:
                    rate[stage] = least / alone[stage]
                    bound[stage] = tightest
                    growing -= 1
                    for channel in range(channels):
                        residual[channel] = max(0.0, residual[channel] - rate[stage] * work[stage, channel])
