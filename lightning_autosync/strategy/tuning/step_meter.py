"""`StepMeter` and `RelaxedMeter`: what the steps of exact and of relaxed replicas took and sent on this rank."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from lightning_autosync.engine.tracing import StepTrace
from lightning_autosync.plan import Schedule
from lightning_autosync.plan.traffic import sent_bytes
from lightning_autosync.replay import Constants, least_step
from lightning_autosync.step_times import typical_step
from lightning_autosync.strategy.resolution import Resolution
from lightning_autosync.workload import Workload

_Span = tuple[float, float]
"""The start and the end of something."""
_MOST = 10_000
"""Largest number of steps that are kept for the next figures."""
_RECENT = 15
"""Number of last steps whose traces are kept."""
_MOST_ENTRIES = 1_000
"""Largest number of figures that are kept for the page of the job."""


@dataclass(frozen=True)
class StepFigures:
    """Some consecutive steps on one rank. Times are those of typical steps; of relaxed replicas, means.

    Attributes:
        step_time: seconds from the end of one synchronization to the end of the next. Ranks synchronize together, so it
            is the same on all of them. Relaxed replicas: seconds from the end of one step to the end of the next.
        wait: seconds of a step in which this rank waited for other ranks or servers.
        bytes: mean bytes that this rank sent in a step, by `sent_bytes`; None if that is unknown. Relaxed replicas:
            bytes handed to the kernel.
        overlap: share of the time with a message under way in which the rank did not wait; None if no message was.
        share_of_bound: least step time of any exact plan on these links with this rank's computation, divided by the
            step time; None on one node, where no link limits a step, if rates are unknown, if the plan is not exact, or
            if messages carry touched rows only. Where most steps overlapped, the least time is that of a step that
            overlaps.
        plan_changes: number of times that the job has taken another plan so far.
        overlapped_steps: share of the steps whose backward pass ended without a wait; None without ``overlap="step"``.
        batch_share: share of a global batch that this rank computes; None without batch shares.
        tuning: whether the job tries other plans, or may yet do so. Relaxed replicas: None.
    """

    step_time: float
    wait: float
    bytes: float | None
    overlap: float | None
    share_of_bound: float | None
    plan_changes: int
    overlapped_steps: float | None = None
    batch_share: float | None = None
    tuning: bool | None = None

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
    overlapped: bool


class StepMeter:
    """Collects what steps took, until `take` asks for their figures: of the last 10,000 steps, if there are more.

    It makes no collective calls.

    Args:
        overlaps: whether steps may overlap with the next forward pass.

    Attributes:
        history: number of steps so far, and figures, of the last 1,000 calls of `take`.
    """

    def __init__(self, rank: int, overlaps: bool = False) -> None:
        self.rank, self._overlaps = rank, overlaps
        self._count = 0
        self.history: deque[tuple[int, StepFigures]] = deque(maxlen=_MOST_ENTRIES)
        self._recent: deque[tuple[float, StepTrace, Schedule]] = deque(maxlen=_RECENT)
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
            self._known[key] = None if sent is None else sent[self.rank]
        synchronized = trace.origin + trace.synchronized
        step = _Step(
            period=synchronized - (trace.origin if self._synchronized is None else self._synchronized),
            forward=trace.forward,
            backward=trace.backward - trace.forward,
            wait=trace.wait,
            overlap=overlap(trace),
            sent=self._known[key],
            overlapped=trace.overlapped,
        )
        self._count += 1
        self._recent.append((step.period, trace, schedule))
        self._synchronized = synchronized
        self._steps.append(step)

    @property
    def typical(self) -> tuple[StepTrace, Schedule] | None:
        """A step of usual length among the last ones, and its schedule; None before the first step."""
        if not self._recent:
            return None
        usual = statistics.median_low(period for period, _, _ in self._recent)
        return next((trace, schedule) for period, trace, schedule in self._recent if period == usual)

    def take(
        self, resolution: Resolution, constants: Constants, plan_changes: int, tuning: bool = False
    ) -> StepFigures | None:
        """The figures of the steps since the last call; None if there were none.

        Args:
            resolution: what the job uses now.
            constants: costs of the hosts.
            plan_changes: number of times that the job has taken another plan so far.
            tuning: whether the job tries other plans, or may yet do so.
        """
        steps = list(self._steps)
        self._steps.clear()
        if not steps:
            return None
        step_time = typical_step([step.period for step in steps])
        shares = [step.overlap for step in steps if step.overlap is not None]
        known = [step.sent for step in steps if step.sent is not None]
        least = self._least_step(steps, resolution, constants)
        found = StepFigures(
            step_time=step_time,
            wait=statistics.median(step.wait for step in steps),
            bytes=statistics.fmean(known) if len(known) == len(steps) else None,
            overlap=statistics.median(shares) if shares else None,
            share_of_bound=None if least is None else least / step_time,
            plan_changes=plan_changes,
            overlapped_steps=statistics.fmean(step.overlapped for step in steps) if self._overlaps else None,
            tuning=tuning,
        )
        self.history.append((self._count, found))
        return found

    def _least_step(self, steps: Sequence[_Step], found: Resolution, constants: Constants) -> float | None:
        """Least seconds of a step under any exact plan; None if that is unknown."""
        by_rows = found.schedule is None or any(message.rows for message in found.schedule.messages)
        # On one node the rate is the default of `local_bandwidth`, and the bound is all but the computation alone.
        linked = len(found.cluster.nodes) > 1 and found.cluster.measured
        if not linked or found.plan.semantics != "exact" or by_rows:
            return None
        overlapped = statistics.fmean(step.overlapped for step in steps) > 0.5
        forward = 0.0 if overlapped else statistics.median(step.forward for step in steps)
        backward = 0.0 if overlapped else statistics.median(step.backward for step in steps)
        workload = computing(found, self.rank, forward, backward)
        seconds = least_step(workload, found.cluster, constants.framing, constants.burst).seconds
        # Sums that may travel during all of a step take the longer one of computation and communication.
        return max(seconds, statistics.median(step.period - step.wait for step in steps)) if overlapped else seconds


def computing(found: Resolution, rank: int, forward: float, backward: float) -> Workload:
    """The workload of a job, with the seconds of computation that a rank measured."""
    speed = found.cluster.nodes[found.cluster.rank_nodes[rank]].speed
    return found.workload.model_copy(update={"forward_time": speed * forward, "backward_time": speed * backward})


def overlap(trace: StepTrace) -> float | None:
    """Share of the time with a message under way in which the main thread did not wait; None without any."""
    spans = (
        (start, end)
        for start, end in zip(trace.started, trace.completed, strict=True)
        if start is not None and end is not None
    )
    moving = _union(spans)
    whole = sum(end - start for start, end in moving)
    return 1.0 - _common(moving, _union(trace.waits)) / whole if whole else None


def _union(spans: Iterable[_Span]) -> list[_Span]:
    """The same times as ascending spans that do not touch each other."""
    made: list[_Span] = []
    for start, end in sorted(spans):
        if made and start <= made[-1][1]:
            made[-1] = made[-1][0], max(made[-1][1], end)
        elif end > start:
            made.append((start, end))
    return made


def _common(ones: Sequence[_Span], others: Sequence[_Span]) -> float:
    """Seconds that lie in both of two unions."""
    total, one, other = 0.0, 0, 0
    while one < len(ones) and other < len(others):
        (start, end), (begin, stop) = ones[one], others[other]
        total += max(0.0, min(end, stop) - max(start, begin))
        one, other = (one + 1, other) if end < stop else (one, other + 1)
    return total


class RelaxedMeter:
    """Collects what steps took, until `take` asks for their figures. Meetings, and what comes with them, do not count.

    Figures are means, because many relaxed methods exchange in some steps only. It makes no collective calls.
    """

    def __init__(self) -> None:
        self._begun: tuple[float, int] | None = None
        self._clear()

    def _clear(self) -> None:
        self._steps = self._bytes = 0
        self._seconds = self._waited = 0.0

    def begin(self, sent: int) -> None:
        """Begin the first step after a barrier of all ranks.

        Args:
            sent: bytes that this process has sent so far.
        """
        self._begun = time.perf_counter(), sent

    def add(self, waited: float, sent: int) -> None:
        """Add a step that ends now.

        Args:
            waited: seconds of it in which the rank waited for other processes.
            sent: bytes that this process has sent so far.
        """
        now = time.perf_counter()
        if self._begun is not None:
            begun, before = self._begun
            self._steps += 1
            self._seconds += now - begun
            self._bytes += sent - before
            self._waited += waited
        self._begun = now, sent

    def take(self) -> StepFigures | None:
        """The figures of the steps since the last call; None if there were none."""
        steps = self._steps
        if not steps:
            return None
        found = StepFigures(
            step_time=self._seconds / steps,
            wait=self._waited / steps,
            bytes=self._bytes / steps,
            overlap=None,
            share_of_bound=None,
            plan_changes=0,
        )
        self._clear()
        return found
