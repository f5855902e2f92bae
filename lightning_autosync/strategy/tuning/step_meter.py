"""`StepMeter`: what synchronized steps took and sent on this rank."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lightning_autosync.engine.tracing import StepTrace
from lightning_autosync.plan import Schedule
from lightning_autosync.plan.traffic import sent_bytes
from lightning_autosync.replay import Constants, least_step
from lightning_autosync.strategy.resolution import Resolution

_MOST = 10_000
"""Largest number of steps that are kept for the next figures."""


@dataclass(frozen=True)
class StepFigures:
    """Some consecutive synchronized steps on one rank. Times are medians of the steps.

    Attributes:
        step_time: seconds from the end of one synchronization to the end of the next. Ranks synchronize together, so it
            is the same on all of them.
        wait: seconds of a step in which this rank waited after its backward pass until it had all means.
        bytes: mean bytes that this rank sent in a step, by `sent_bytes`; None if that is unknown.
        overlap: share of the time with a message under way that lay before the end of the backward pass; None if no
            message was.
        share_of_bound: least step time of any exact plan on these links with this rank's computation, divided by the
            step time; None if rates are unknown, the plan is not exact, or messages carry touched rows only.
        plan_changes: number of times that the job has taken another plan so far.
    """

    step_time: float
    wait: float
    bytes: float | None
    overlap: float | None
    share_of_bound: float | None
    plan_changes: int

    def metrics(self) -> dict[str, float]:
        """The known numbers by name, for loggers."""
        return {name: float(value) for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class _Step:
    """What the figures need of one step: seconds, the share of `overlap`, and bytes."""

    period: float
    forward: float
    backward: float
    wait: float
    overlap: float | None
    sent: float | None


class StepMeter:
    """Collects what steps took, until `take` asks for their figures: of the last 10,000 steps, if there are more.

    It makes no collective calls.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._steps: deque[_Step] = deque(maxlen=_MOST)
        self._synchronized: float | None = None
        self._known: dict[str, float | None] = {}

    def add(self, trace: StepTrace, schedule: Schedule) -> None:
        """Add a step.

        Args:
            trace: its times. It begins after the previous step's synchronization; what lies between counts as part of
                this step's period.
            schedule: the schedule by which it was synchronized.
        """
        key = schedule.fingerprint
        if key not in self._known:
            sent = sent_bytes(schedule)
            self._known[key] = None if sent is None else sent[self._rank]
        synchronized = trace.origin + trace.synchronized
        step = _Step(
            period=synchronized - (trace.origin if self._synchronized is None else self._synchronized),
            forward=trace.forward,
            backward=trace.backward - trace.forward,
            wait=trace.synchronized - trace.backward,
            overlap=overlap(trace),
            sent=self._known[key],
        )
        self._synchronized = synchronized
        self._steps.append(step)

    def take(self, resolution: Resolution, constants: Constants, plan_changes: int) -> StepFigures | None:
        """The figures of the steps since the last call; None if there were none.

        Args:
            resolution: what the job uses now.
            constants: costs of the hosts.
            plan_changes: number of times that the job has taken another plan so far.
        """
        steps = list(self._steps)
        self._steps.clear()
        if not steps:
            return None
        step_time = statistics.median(step.period for step in steps)
        shares = [step.overlap for step in steps if step.overlap is not None]
        known = [step.sent for step in steps if step.sent is not None]
        least = self._least_step(steps, resolution, constants)
        return StepFigures(
            step_time=step_time,
            wait=statistics.median(step.wait for step in steps),
            bytes=statistics.fmean(known) if len(known) == len(steps) else None,
            overlap=statistics.median(shares) if shares else None,
            share_of_bound=None if least is None else least / step_time,
            plan_changes=plan_changes,
        )

    def _least_step(self, steps: Sequence[_Step], found: Resolution, constants: Constants) -> float | None:
        """Least seconds of a step under any exact plan; None if that is unknown."""
        by_rows = found.schedule is None or any(message.rows for message in found.schedule.messages)
        if not found.cluster.measured or found.plan.semantics != "exact" or by_rows:
            return None
        speed = found.cluster.nodes[found.cluster.rank_nodes[self._rank]].speed
        workload = found.workload.model_copy(
            update={
                "forward_time": speed * statistics.median(step.forward for step in steps),
                "backward_time": speed * statistics.median(step.backward for step in steps),
            }
        )
        return least_step(workload, found.cluster, constants.framing, constants.burst).seconds


def overlap(trace: StepTrace) -> float | None:
    """Share of the time with a message under way that lay before the end of the backward pass; None without any."""
    spans = sorted(
        (start, end)
        for start, end in zip(trace.started, trace.completed, strict=True)
        if start is not None and end is not None
    )
    whole = hidden = reached = 0.0
    for start, end in spans:
        begin = max(start, reached)
        if end > begin:
            whole += end - begin
            hidden += max(0.0, min(end, trace.backward) - begin)
            reached = end
    return hidden / whole if whole else None
