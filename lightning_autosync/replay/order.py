"""What each stage waits for before it starts, and which goes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from lightning_autosync.plan.schedule import Schedule
from lightning_autosync.replay.compute import Chores, Compute
from lightning_autosync.replay.network import Floats
from lightning_autosync.replay.stages import Stage


@dataclass(frozen=True)
class StartOrder:
    """Conditions of the stages' starts, as arrays [stages].

    Attributes:
        release: seconds before which it cannot start, on the slowest rank.
        delay: seconds between its conditions and its start.
        after: [stages, 3] the stage that must have ended, the one that must have started, and the part of the main
            threads' work that must have been done (a stage by the number, after all others); -1 for none.
        urgency: rank of each in the transport's order: by priority, then channel.
        queue: place in the backend's queue; -1 for stages on trees.
    """

    release: Floats
    delay: Floats
    after: NDArray[numpy.int64]
    urgency: NDArray[numpy.int64]
    queue: NDArray[numpy.int64]

    @staticmethod
    def of(schedule: Schedule, stages: Sequence[Stage], slowest: Compute, chores: Chores | None) -> StartOrder:
        """The order in which the engine starts the stages of a schedule; ``chores`` where ranks share cores."""
        count = len(stages)
        release, delay = numpy.zeros(count), numpy.zeros(count)
        after = numpy.full((count, 3), -1, dtype=numpy.int64)
        queue = numpy.full(count, -1, dtype=numpy.int64)
        launched_last = -1
        for number, stage in enumerate(stages):
            if number and stages[number - 1].message == stage.message:
                after[number, 0] = number - 1
            if stage.deferred:
                # The engine resumes message after message once the backward pass is over.
                release[number], delay[number] = slowest.backward, stage.launch
                after[number, 1], launched_last = launched_last, number
            else:
                release[number] = slowest.start[stage.message]
            if chores is not None:
                part = len(chores.core) - 1 if stage.deferred else chores.part_of[stage.message]
                after[number, 2] = count + part
        collectives = [number for number, stage in enumerate(stages) if stage.collective]
        for place, number in enumerate(sorted(collectives, key=lambda number: (stages[number].deferred, number))):
            queue[number] = place
        priorities = numpy.array([-schedule.messages[stage.message].priority for stage in stages])
        urgency = numpy.empty(count, dtype=numpy.int64)
        urgency[numpy.argsort(priorities, kind="stable")] = numpy.arange(count)
        return StartOrder(release, delay, after, urgency, queue)
