"""When stages may start, when they ran, and the critical path of the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy

from lightning_autosync.plan.schedule import Schedule
from lightning_autosync.replay.compute import Compute, HostWork
from lightning_autosync.replay.network import Floats, Indices
from lightning_autosync.replay.prediction import Span
from lightning_autosync.replay.stages import Stage


class StartOrder(NamedTuple):
    """Conditions of the stages' starts, as arrays [stages].

    Attributes:
        release: earliest start on the slowest rank, in seconds.
        delay: seconds from when the conditions hold until the start.
        after: [stages, 3] the stage that must have ended, the stage that must have started, and the part of the main
            threads' work that must be done (its index continues those of the stages); -1 for none.
        urgency: position in the transport's order: by priority, then by channel.
        queue: position in the backend's queue; -1 for stages on trees.
    """

    release: Floats
    delay: Floats
    after: Indices
    urgency: Indices
    queue: Indices

    @staticmethod
    def of(schedule: Schedule, stages: Sequence[Stage], slowest: Compute, host_work: HostWork | None) -> StartOrder:
        """The order in which the engine starts a schedule's stages; ``host_work`` is None if ranks share no cores."""
        count = len(stages)
        release, delay = numpy.zeros(count), numpy.zeros(count)
        after = numpy.full((count, 3), -1, dtype=numpy.int64)
        queue = numpy.full(count, -1, dtype=numpy.int64)
        launched_last = -1
        for number, stage in enumerate(stages):
            if number and stages[number - 1].message == stage.message:
                after[number, 0] = after[number - 1, 0] if stage.beside else number - 1
            if stage.deferred:
                # After the backward pass the engine resumes messages one by one, so each start waits for the last.
                release[number], delay[number] = slowest.backward, stage.launch
                after[number, 1], launched_last = launched_last, number
            else:
                release[number] = slowest.start[stage.message]
            if host_work is not None:
                part = len(host_work.core) - 1 if stage.deferred else host_work.part_of[stage.message]
                after[number, 2] = count + part
        collectives = [number for number, stage in enumerate(stages) if stage.collective]
        for place, number in enumerate(sorted(collectives, key=lambda number: (stages[number].deferred, number))):
            queue[number] = place
        priorities = numpy.array([-schedule.messages[stage.message].priority for stage in stages])
        urgency = numpy.empty(count, dtype=numpy.int64)
        urgency[numpy.argsort(priorities, kind="stable")] = numpy.arange(count)
        return StartOrder(release, delay, after, urgency, queue)


_SAME = 1e-9
"""Seconds within which two times count as equal."""


class StageTimes(NamedTuple):
    """When stages ran, as arrays [stages] in seconds from the start of the step.

    Attributes:
        start: time when the stage's conditions were met.
        moved: time when its first bytes moved.
        drained: time when its last bytes left.
        end: time when the last rank had received them.
        bound: channel that limited the stage when it last moved, -1 for none; in frames, its busiest channel. A pace of
            a connection has the number ``channels + connection`` (see `NetworkArrays`).
    """

    start: Floats
    moved: Floats
    drained: Floats
    end: Floats
    bound: Indices


def critical_path(
    schedule: Schedule,
    stages: Sequence[Stage],
    order: StartOrder,
    times: StageTimes,
    compute: Compute,
    synchronized: float,
    step_time: float,
    channels: Sequence[str],
) -> tuple[Span, ...]:
    """The critical path, found backwards from the end of the step: each span had to end before the next could begin."""
    path: list[Span] = []

    def add(name: str, start: float, end: float) -> None:
        if end > start + _SAME:
            path.append(Span(name, start, end))

    add("optimizer", synchronized, step_time)
    number = int(numpy.argmax(times.end)) if len(stages) else -1
    now = synchronized
    if number < 0 or times.end[number] <= compute.backward:
        add("finish", compute.backward, now)
        number, now = -1, compute.backward
    else:
        add("finish", float(times.end[number]), now)
        now = float(times.end[number])
    seen: set[int] = set()
    while number >= 0:
        seen.add(number)
        moved = min(now, float(times.moved[number]))
        channel = _limit(int(times.bound[number]), channels, schedule.world_size)
        add(f"message '{schedule.messages[stages[number].message].name}' on {channel}", moved, now)
        now = moved
        number = _cause(number, stages, order, times, seen)
        if number >= 0:
            before = min(now, float(times.end[number]))
            add("launch", before, now)
            now = before
    add("backward", compute.forward, now)
    add("forward", 0.0, min(now, compute.forward))
    return tuple(reversed(path))


def _limit(bound: int, channels: Sequence[str], ranks: int) -> str:
    """The name of what limited a stage; ``bound`` is as in `StageTimes`."""
    if bound < 0:
        return "its pipeline"
    if bound < len(channels):
        return channels[bound]
    row, target = divmod(bound - len(channels), ranks)
    interface, source = divmod(row, ranks)
    over = f" over interface {interface}" if interface else ""
    return f"paced connection from rank {source} to rank {target}{over}"


def _cause(number: int, stages: Sequence[Stage], order: StartOrder, times: StageTimes, seen: set[int]) -> int:
    """The stage whose end allowed this one to begin; -1 if it waited for computation only."""
    moved, start = times.moved[number], times.start[number]
    if moved > start + _SAME:
        return _nearest(times.drained, moved, seen)
    first, second, _ = order.after[number]
    if second >= 0 and times.start[second] >= start - order.delay[number] - _SAME:
        return _cause(int(second), stages, order, times, seen) if second not in seen else -1
    begun = start - order.delay[number]
    if first >= 0 and abs(times.end[first] - begun) <= _SAME and first not in seen:
        return int(first)
    if order.queue[number] >= 0 and begun > order.release[number] + _SAME:
        return _nearest(times.end, begun, seen)
    return -1


def _nearest(moments: Floats, now: float, seen: set[int]) -> int:
    """The unseen stage with the latest time up to ``now``; -1 if there is none."""
    candidates = [number for number in range(len(moments)) if number not in seen and moments[number] <= now + _SAME]
    return max(candidates, key=lambda number: moments[number], default=-1)
