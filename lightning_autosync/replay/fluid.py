"""Fluid simulation of stages: a stage loads its channels in fixed proportions, and stages share them by urgency."""

from __future__ import annotations

from typing import NamedTuple

import numpy

from lightning_autosync.replay.compiled import compiled
from lightning_autosync.replay.network import Flags, Floats, Indices
from lightning_autosync.replay.outcome import StageTimes, StartOrder
from lightning_autosync.replay.token_buckets import next_change, open_capacities, refill

_DONE = 1e-9
"""Share of a stage's work that may be left when it ends, because of rounding over many steps."""


class StageConditions(NamedTuple):
    """Demands and dependencies of stages.

    Attributes:
        work: [stages, channels] demand of each stage: bytes on links, core-seconds on hosts.
        fill: [stages] seconds from the end of a stage's work to its end.
        waiting: [stages] seconds in which a stage waits between its pieces. Others use the channels meanwhile.
        order: conditions of the stages' starts.
        rivals: [stages, stages] whether two stages share connections, on which the more urgent goes first.
        whole: [stages] the stage of which a stage is a part; itself for no part. Parts begin earlier and have larger
            indices; a stage takes over what is left of them when it starts.
        whole_fill: [stages] ``fill`` of a stage and its parts together.
    """

    work: Floats
    fill: Floats
    waiting: Floats
    order: StartOrder
    rivals: Flags
    whole: Indices
    whole_fill: Floats


class _State(NamedTuple):
    """State of the stages, as arrays [stages].

    Attributes:
        work: [stages, channels] as in `StageConditions`, with what a stage took over from its parts.
        fill: as in `StageConditions`, longer if a stage took over work.
        waiting: as in `StageConditions`.
        left: remaining share of a stage's work.
        rate: share of the work per second.
        level: level among rivals, 0 for the most urgent; -1 if the stage does not run.
        alone: seconds that the work takes if nothing else runs.
    """

    work: Floats
    fill: Floats
    waiting: Floats
    left: Floats
    rate: Floats
    level: Indices
    alone: Floats


@compiled
def drain(conditions: StageConditions, capacities: Floats, slots: int, tokens: Floats, burst: Floats) -> StageTimes:
    """Run all stages.

    Args:
        conditions: demands and dependencies of the stages.
        capacities: [channels] units per second: bytes on links, core-seconds on hosts.
        slots: number of the backend's stages that run at once.
        tokens: [channels] units that a channel passes at once at the start; updated in place to those at the end of
            the last stage.
        burst: [channels] most tokens that a channel collects.
    """
    times, state = _before_all(conditions, capacities)
    by_urgency = numpy.argsort(conditions.order.urgency)
    shaped = burst.max() > 0
    now = 0.0
    while True:
        coming = _start_and_end(conditions, state, times, capacities, slots, now)
        deepest = _set_levels(by_urgency, conditions.rivals, state, times, now)
        _share(open_capacities(capacities, tokens), state, deepest, times.bound)
        flow = _flow(state.work, state) if shaped else capacities
        step = min(coming - now, next_change(flow, capacities, tokens), _move(state, times, now))
        if step == numpy.inf:
            return times
        # Jump exactly to an event: after rounding, the sum could be just before it.
        now = coming if now + step >= coming else now + step
        if shaped:
            refill(flow, capacities, tokens, burst, step)
        for stage in range(len(state.left)):
            if state.level[stage] >= 0:
                state.left[stage] = max(0.0, state.left[stage] - state.rate[stage] * step)


@compiled
def _before_all(conditions: StageConditions, capacities: Floats) -> tuple[StageTimes, _State]:
    """The times and the state of stages of which none has started."""
    count = len(conditions.fill)
    never = numpy.full(count, numpy.inf)
    times = StageTimes(never, never.copy(), never.copy(), never.copy(), numpy.full(count, -1, dtype=numpy.int64))
    alone = _alone(conditions.work, capacities)
    state = _State(
        conditions.work.copy(),
        # A stage without work ends when it has waited.
        conditions.fill + conditions.waiting * (alone == 0),
        conditions.waiting,
        numpy.ones(count),
        numpy.zeros(count),
        numpy.zeros(count, dtype=numpy.int64),
        alone,
    )
    return times, state


@compiled
def _move(state: _State, times: StageTimes, now: float) -> float:
    """Record which stages move from now on; returns the seconds until the first of them has no work left."""
    least = numpy.inf
    for stage in range(len(state.left)):
        if state.level[stage] >= 0 and state.rate[stage] > 0:
            least = min(least, state.left[stage] / state.rate[stage])
            times.moved[stage] = min(times.moved[stage], now)
    return least


@compiled
def _alone(work: Floats, capacities: Floats) -> Floats:
    """[stages] seconds that each stage's work takes if nothing else runs."""
    stages, channels = work.shape
    alone = numpy.zeros(stages)
    for stage in range(stages):
        for channel in range(channels):
            alone[stage] = max(alone[stage], work[stage, channel] / capacities[channel])
    return alone


@compiled
def _start_and_end(
    conditions: StageConditions, state: _State, times: StageTimes, capacities: Floats, slots: int, now: float
) -> float:
    """Start and end the stages that are due; returns the time of the next start or end.

    This repeats until nothing changes, because the start or end of one stage may let others start.
    """
    coming = numpy.inf
    changed = True
    while changed:
        changed = False
        coming = numpy.inf
        for stage in range(len(times.start)):
            if times.end[stage] < numpy.inf and times.end[stage] > now:
                coming = min(coming, times.end[stage])
            if times.start[stage] < numpy.inf:
                if times.start[stage] > now:
                    coming = min(coming, times.start[stage])
                elif times.drained[stage] == numpy.inf and (state.left[stage] <= _DONE or state.alone[stage] == 0):
                    times.drained[stage] = now
                    times.moved[stage] = min(times.moved[stage], now)
                    times.end[stage] = now + state.fill[stage]
                    changed = True
            elif conditions.order.release[stage] > now:
                coming = min(coming, conditions.order.release[stage])
            elif _may_start(stage, conditions, times, slots, now):
                times.start[stage] = now + conditions.order.delay[stage]
                _take_over(stage, conditions, state, times, capacities, now)
                changed = True
    return coming


@compiled
def _take_over(
    stage: int, conditions: StageConditions, state: _State, times: StageTimes, capacities: Floats, now: float
) -> None:
    """Let a stage that starts do what is left of the parts that may have begun before it."""
    work, left = state.work[stage], 0.0
    for part in range(stage + 1, len(times.end)):
        if conditions.whole[part] == conditions.whole[stage] and times.drained[part] == numpy.inf:
            work += state.left[part] * state.work[part]
            left = max(left, state.left[part])
            times.start[part] = min(times.start[part], now)
            times.drained[part] = times.end[part] = now
    if left > 0:
        state.fill[stage] += left * (conditions.whole_fill[stage] - state.fill[stage])
        state.alone[stage] = (work / capacities).max()


@compiled
def _may_start(stage: int, conditions: StageConditions, times: StageTimes, slots: int, now: float) -> bool:
    """Whether all conditions of a stage's start hold, except its release time."""
    first, second, third = conditions.order.after[stage]
    if (first >= 0 and times.end[first] > now) or (second >= 0 and times.start[second] > now):
        return False
    if third >= 0 and times.end[third] > now:
        return False
    place = conditions.order.queue[stage]
    if place < 0:
        return True
    open_before = 0
    for other in range(len(times.end)):
        before = 0 <= conditions.order.queue[other] < place and times.end[other] > now
        if before and conditions.whole[other] == other:
            open_before += 1
    return open_before < slots


@compiled
def _set_levels(by_urgency: Indices, rivals: Flags, state: _State, times: StageTimes, now: float) -> int:
    """Put each running stage one level behind its more urgent rivals; returns the largest level, -1 for none."""
    level = state.level
    deepest = -1
    for place in range(len(by_urgency)):
        stage = by_urgency[place]
        level[stage] = -1
        if times.start[stage] > now or times.drained[stage] < numpy.inf:
            continue
        level[stage] = 0
        for earlier in range(place):
            other = by_urgency[earlier]
            if level[other] >= level[stage] and rivals[stage, other]:
                level[stage] = level[other] + 1
        deepest = max(deepest, level[stage])
    return deepest


@compiled
def _flow(work: Floats, state: _State) -> Floats:
    """[channels] total use per second by all running stages."""
    flow = numpy.zeros(work.shape[1])
    for stage in range(len(work)):
        if state.level[stage] >= 0:
            for channel in range(work.shape[1]):
                flow[channel] += state.rate[stage] * work[stage, channel]
    return flow


@compiled
def _share(capacities: Floats, state: _State, deepest: int, bound: Indices) -> None:
    """Progressive filling, level by level. Rates of a level grow together, in proportion to each stage's rate alone."""
    residual, most = capacities.copy(), _most_growth(capacities, state)
    for current in range(deepest + 1):
        growing = 0
        for stage in range(len(most)):
            if state.level[stage] == current:
                state.rate[stage] = -1.0  # not fixed yet
                growing += 1
        while growing:
            growing -= _fill_one(residual, most, state, current, bound)


@compiled
def _most_growth(capacities: Floats, state: _State) -> Floats:
    """[stages] largest rate of a stage that waits between its pieces, relative to that of its work alone."""
    most = numpy.full(len(state.work), numpy.inf)
    for stage in range(len(most)):
        if state.level[stage] >= 0 and state.waiting[stage] > 0:
            most[stage] = state.alone[stage] / ((state.work[stage] / capacities).max() + state.waiting[stage])
    return most


@compiled
def _fill_one(residual: Floats, most: Floats, state: _State, current: int, bound: Indices) -> int:
    """Fix the rates of the stages on the channel that saturates first, or of the first that waits for its pieces.

    Returns the number of these stages.
    """
    work, rate, alone = state.work, state.rate, state.alone
    stages, channels = work.shape
    weight = numpy.zeros(channels)
    for stage in range(stages):
        if state.level[stage] == current and rate[stage] < 0:
            for channel in range(channels):
                weight[channel] += work[stage, channel] / alone[stage]
    least, tightest = numpy.inf, -1
    for channel in range(channels):
        if weight[channel] > 0 and residual[channel] < least * weight[channel]:
            least, tightest = residual[channel] / weight[channel], channel
    waits = -1
    for stage in range(stages):
        if state.level[stage] == current and rate[stage] < 0 and most[stage] < least:
            least, tightest, waits = most[stage], -1, stage
    fixed = 0
    for stage in range(stages):
        chosen = work[stage, tightest] > 0 if waits < 0 else stage == waits
        if state.level[stage] == current and rate[stage] < 0 and chosen:
            rate[stage] = least / alone[stage]
            bound[stage] = tightest
            fixed += 1
            for channel in range(channels):
                residual[channel] = max(0.0, residual[channel] - rate[stage] * work[stage, channel])
    return fixed
