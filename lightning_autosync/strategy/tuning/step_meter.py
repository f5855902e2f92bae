"""`StepMeter`: what synchronized steps took and sent on this rank."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass

from lightning_autosync.engine.tracing import StepTrace
from lightning_autosync.plan import Schedule
from lightning_autosync.plan.traffic import sent_bytes
from lightning_autosync.replay import Constants, least_step
from lightning_autosync.strategy.resolution import Resolution


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


class StepMeter:
    """Collects the traces of steps, until `take` asks for their figures.

    A step costs one entry in a list. It makes no collective calls.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._traces: list[StepTrace] = []
        self._sent: list[float | None] = []
        self._known: dict[str, float | None] = {}

    def add(self, trace: StepTrace, schedule: Schedule) -> None:
        """Add a step.

        Args:
            trace: its times; it begins where the previous step's synchronization ended.
            schedule: the schedule by which it was synchronized.
        """
        key = schedule.fingerprint
        if key not in self._known:
            sent = sent_bytes(schedule)
            self._known[key] = None if sent is None else sent[self._rank]
        self._traces.append(trace)
        self._sent.append(self._known[key])

    def take(self, resolution: Resolution, constants: Constants, plan_changes: int) -> StepFigures | None:
        """The figures of the steps since the last call; None if there were none.

        Args:
            resolution: what the job uses now.
            constants: costs of the hosts.
            plan_changes: number of times that the job has taken another plan so far.
        """
        traces, sent = self._traces, self._sent
        self._traces, self._sent = [], []
        if not traces:
            return None
        step_time = statistics.median(trace.synchronized for trace in traces)
        shares = [share for trace in traces if (share := overlap(trace)) is not None]
        known = [each for each in sent if each is not None]
        least = self._least_step(traces, resolution, constants)
        return StepFigures(
            step_time=step_time,
            wait=statistics.median(trace.synchronized - trace.backward for trace in traces),
            bytes=statistics.fmean(known) if len(known) == len(sent) else None,
            overlap=statistics.median(shares) if shares else None,
            share_of_bound=None if least is None else least / step_time,
            plan_changes=plan_changes,
        )

    def _least_step(self, traces: list[StepTrace], found: Resolution, constants: Constants) -> float | None:
        """Least seconds of a step under any exact plan; None if that is unknown."""
        by_rows = found.schedule is None or any(message.rows for message in found.schedule.messages)
        if not found.cluster.measured or found.plan.semantics != "exact" or by_rows:
            return None
        speed = found.cluster.nodes[found.cluster.rank_nodes[self._rank]].speed
        workload = found.workload.model_copy(
            update={
                "forward_time": speed * statistics.median(trace.forward for trace in traces),
                "backward_time": speed * statistics.median(trace.backward - trace.forward for trace in traces),
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
