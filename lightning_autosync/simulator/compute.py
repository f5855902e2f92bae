"""When gradients are ready, and when the messages made of them can start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_autosync.plan.schedule import Schedule
from lightning_autosync.simulator.constants import Constants
from lightning_autosync.workload import Workload


@dataclass(frozen=True)
class Compute:
    """One rank's own timeline of a step; seconds from its beginning.

    Attributes:
        forward: end of the forward pass.
        ready: for each message, when the last of its gradients is packed.
        start: for each message, when it is handed to the wire.
        backward: end of the backward pass.
    """

    forward: float
    ready: tuple[float, ...]
    start: tuple[float, ...]
    backward: float


class ComputeClock:
    """The compute timeline of a workload.

    Ready times that are all unknown are spread evenly over the backward pass; a variable without one, among others
    that have theirs, has no gradient before the end of the backward pass, when the engine sends what is missing.
    """

    def __init__(self, workload: Workload, constants: Constants) -> None:
        self._workload = workload
        self._ready = _ready_times(workload)
        self._packed: dict[str, float] = {}
        packing = 0.0
        for variable in sorted(workload.variables, key=lambda variable: self._ready[variable.name]):
            touched = variable.rows / variable.shape[0] if variable.rows is not None and variable.numel else 1.0
            packing += touched * variable.bytes / constants.copy_rate
            self._packed[variable.name] = packing
        self._packing = packing

    def run(self, schedule: Schedule, launch_costs: Sequence[float], speed: float) -> Compute:
        """The timeline of a rank.

        Args:
            schedule: the messages.
            launch_costs: for each message, seconds that its launch keeps the rank from computing.
            speed: how fast the rank computes; the workload's times are for 1.
        """
        forward = self._workload.forward_time / speed
        messages = schedule.messages
        last = [max((self._ready[name], self._packed[name]) for name in message.variables) for message in messages]
        ready, start = [0.0] * len(messages), [0.0] * len(messages)
        collectives = [message.index for message in messages if message.collective]
        complete, following, launching = set(), 0, 0.0
        for index in sorted(range(len(messages)), key=lambda index: last[index]):
            computed, packing = last[index]
            now = forward + computed / speed + packing
            ready[index] = now + launching
            if not messages[index].collective:
                launching += launch_costs[index]
                start[index] = now + launching
                continue
            complete.add(index)
            while following < len(collectives) and collectives[following] in complete:
                launching += launch_costs[collectives[following]]
                start[collectives[following]] = now + launching
                following += 1
        backward = forward + self._workload.backward_time / speed + self._packing + launching
        return Compute(forward, tuple(ready), tuple(start), backward)


def _ready_times(workload: Workload) -> dict[str, float]:
    """Seconds from the start of the backward pass, by name."""
    if all(variable.ready is None for variable in workload.variables):
        step = workload.backward_time / len(workload.variables)
        return {name: step * (place + 1) for place, name in enumerate(workload.ready_order)}
    return {
        variable.name: workload.backward_time if variable.ready is None else variable.ready
        for variable in workload.variables
    }
