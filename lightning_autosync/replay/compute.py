"""When gradients are ready, and when their messages can start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_autosync.plan.schedule import Schedule
from lightning_autosync.replay.constants import Constants
from lightning_autosync.workload import Variable, Workload

_COPIES = 3
"""Passes over the touched rows of a table before they travel."""
_PARTS = 12
"""Equal parts of the backward pass by which `HostWork` groups the main threads' work."""


@dataclass(frozen=True)
class Compute:
    """One rank's compute timeline of a step, in seconds from the start of the step.

    Attributes:
        forward: end of the forward pass.
        ready: [messages] time when the last gradient of each message is packed.
        start: [messages] time when each message is handed to the transport.
        backward: end of the backward pass.
    """

    forward: float
    ready: tuple[float, ...]
    start: tuple[float, ...]
    backward: float


@dataclass(frozen=True)
class HostWork:
    """Work of the ranks' main threads on shared cores, by part of the backward pass.

    Attributes:
        release: [parts] earliest start of each part's work, in seconds from the start of the step.
        core: [parts] core-seconds per rank, computation included.
        part_of: [messages] part in which the last gradient of a message is packed and the message is launched.
    """

    release: tuple[float, ...]
    core: tuple[float, ...]
    part_of: tuple[int, ...]


class ComputeClock:
    """The compute timeline of a workload.

    If no variable has a ready time, ready times are spread evenly over the backward pass. If only some lack one, those
    count as ready at the end of the backward pass, when the engine sends whatever is missing. Gradients that are ready
    at the same time are packed in `Workload.ready_order`.
    """

    def __init__(self, workload: Workload, constants: Constants, ranks: int) -> None:
        self._workload = workload
        self._accelerated = constants.accelerated
        self._cores = constants.computing_cores(ranks)
        ready = ready_times(workload)
        self._costs: list[tuple[str, float, float]] = []
        in_order = [workload.variable(name) for name in workload.ready_order]
        for variable in sorted(in_order, key=lambda variable: ready[variable.name]):
            seconds = constants.gradient_cost + _packing(variable, constants)
            self._costs.append((variable.name, ready[variable.name], seconds))
        self._packed: dict[float, tuple[dict[str, float], float]] = {}

    def run(self, schedule: Schedule, launch_costs: Sequence[float], speed: float) -> Compute:
        """The timeline of a rank.

        Args:
            schedule: the messages.
            launch_costs: [messages] seconds for which each launch keeps the rank from computing.
            speed: relative compute speed of the rank; the workload's times hold for 1.
        """
        forward = self._workload.forward_time / speed
        if speed not in self._packed:
            self._packed[speed] = self._pack(speed)
        packed, end = self._packed[speed]
        messages = schedule.messages
        last = [max(packed[name] for name in message.variables) for message in messages]
        ready, start = [0.0] * len(messages), [0.0] * len(messages)
        collectives = [message.index for message in messages if message.collective]
        complete, following, launching = set(), 0, 0.0
        for index in sorted(range(len(messages)), key=lambda index: last[index]):
            now = forward + last[index]
            ready[index] = now + launching
            if not messages[index].collective:
                launching += launch_costs[index]
                start[index] = now + launching
                continue
            complete.add(index)
            # Collectives must start in the same order on all ranks, so one waits until all before it are complete.
            while following < len(collectives) and collectives[following] in complete:
                launching += launch_costs[collectives[following]]
                start[collectives[following]] = now + launching
                following += 1
        return Compute(forward, tuple(ready), tuple(start), forward + end + launching)

    def host_work(self, schedule: Schedule, launch_costs: Sequence[float], speed: float) -> HostWork:
        """The main threads' work; arguments as in `run`."""
        backward, forward = self._workload.backward_time / speed, self._workload.forward_time / speed
        part = {
            name: min(_PARTS - 1, int(_PARTS * ready / self._workload.backward_time)) if backward > 0 else 0
            for name, ready, _ in self._costs
        }
        core = [self._cores * backward / _PARTS] * _PARTS
        for name, _, seconds in self._costs:
            core[part[name]] += seconds
        part_of = [max(part[name] for name in message.variables) for message in schedule.messages]
        for place, cost in zip(part_of, launch_costs, strict=True):
            core[place] += cost
        release = [forward + backward * place / _PARTS for place in range(_PARTS)]
        return HostWork(tuple(release), tuple(core), tuple(part_of))

    def _pack(self, speed: float) -> tuple[dict[str, float], float]:
        """Seconds from the start of backward until each gradient is packed, by name, and until backward ends."""
        packed: dict[str, float] = {}
        now = late = 0.0
        for name, ready, seconds in self._costs:
            # An accelerator computes during packing. A core that does both is delayed by all packing so far.
            now = max(now, ready / speed + (0.0 if self._accelerated else late)) + seconds
            late += seconds
            packed[name] = now
        end = self._workload.backward_time / speed
        return packed, max(now, end if self._accelerated else end + late)


def _packing(variable: Variable, constants: Constants) -> float:
    """Core-seconds to copy a gradient into its message's buffer and, for a table, to find its touched rows."""
    if variable.kind == "dense":
        return variable.bytes / constants.copy_rate
    touched = variable.touched_share
    found = variable.bytes / constants.scan_rate if variable.kind == "row_sparse" else 0.0
    # Touched rows are copied out of the table, divided by the number of ranks, and joined with their indices.
    return found + _COPIES * touched * variable.bytes / constants.copy_rate + constants.merge_cost


def ready_times(workload: Workload) -> dict[str, float]:
    """Seconds from the start of the backward pass until each gradient is ready, by name; see `ComputeClock`."""
    if all(variable.ready is None for variable in workload.variables):
        step = workload.backward_time / len(workload.variables)
        return {name: step * (place + 1) for place, name in enumerate(workload.ready_order)}
    return {
        variable.name: workload.backward_time if variable.ready is None else variable.ready
        for variable in workload.variables
    }
