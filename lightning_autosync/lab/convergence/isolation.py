"""Simulates whether the groups of partial reduces connect all workers, and what that costs. Nothing trains."""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from rich.table import Table

from lightning_autosync.documents import Result
from lightning_autosync.errors import DocumentError
from lightning_autosync.lab.convergence.comparison import prepare
from lightning_autosync.lab.convergence.settings import ConvergenceSettings
from lightning_autosync.measure.figures import numbers_table
from lightning_autosync.measure.models.straggler import Straggler, StragglerSettings
from lightning_autosync.plan import Consistency
from lightning_autosync.relaxed.grouping import BOUND, Grouped, Grouping, IsolationGuard, unconnected_windows


@dataclass(frozen=True)
class SimulatedGroups:
    """The result of a simulation.

    Attributes:
        groups: groups in the order of forming.
        steps: number of steps of each worker.
        idle: share of the workers' time spent waiting for a group to form.
    """

    groups: tuple[Grouped, ...]
    steps: tuple[int, ...]
    idle: float

    @property
    def bridging(self) -> float:
        """Share of the groups that had to connect isolated workers."""
        return sum(group.bridging for group in self.groups) / len(self.groups)


def simulate(
    grouping: Grouping, compute: Sequence[Callable[[], float]], groups: int, exchange: float = 0.0
) -> SimulatedGroups:
    """Simulate workers until ``groups`` groups have formed.

    Args:
        grouping: rules of grouping; a fresh object, which the simulation changes.
        compute: for each worker, a function that draws the seconds of its next step.
        groups: number of groups to form.
        exchange: seconds of a group's average.
    """
    active = range(len(compute))
    steps, waited, since = [0] * len(compute), 0.0, [0.0] * len(compute)
    formed: list[Grouped] = []
    events: list[tuple[float, int]] = [(draw(), rank) for rank, draw in enumerate(compute)]
    heapq.heapify(events)
    now = 0.0
    while len(formed) < groups:
        deadline = grouping.deadline(now)
        if events and (deadline is None or events[0][0] <= deadline):
            now, rank = heapq.heappop(events)
            steps[rank] += 1
            since[rank] = now
            grouping.add(rank, now)
        elif deadline is not None:
            now = deadline
        while group := grouping.take(active, now):
            formed.append(group)
            for rank in group.members:
                waited += now - since[rank]
                heapq.heappush(events, (now + exchange + compute[rank](), rank))
    waited += sum(now - since[rank] for rank in grouping.waiting)
    return SimulatedGroups(tuple(formed), tuple(steps), waited / (now * len(compute)))


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of groups over all seeds.

    Attributes:
        bridging: share of the groups that had to connect isolated workers, mean over seeds.
        windows: number of windows of twice the bound on isolation, one starting at each group.
        apart: number of these windows whose groups did not connect all workers.
        idle: share of the workers' time spent waiting for a group to form, mean over seeds.
    """

    bridging: float
    windows: int
    apart: int
    idle: float


@dataclass(frozen=True)
class IsolationRow:
    """The statistics of a method under some speeds.

    Attributes:
        ruled: statistics with the rule that groups must connect all workers.
        free: statistics without the rule: first come, first served.
    """

    speed: str
    method: str
    ruled: GroupStatistics
    free: GroupStatistics


class IsolationResult(Result):
    """The settings, and a row for each speed and method."""

    FORMAT: ClassVar[str] = "autosync-isolation/1"

    settings: ConvergenceSettings
    simulated: Literal[True] = True
    rows: tuple[IsolationRow, ...]

    def figures(self) -> dict[str, str]:
        return {f"{row.method}, {row.speed}": f"idle {row.ruled.idle:.1%}" for row in self.rows}


def simulate_groups(settings: ConvergenceSettings) -> IsolationResult:
    """Simulate how workers form groups, for all speeds and methods, with the rules of real runs.

    Raises:
        DocumentError: a method is not a partial reduce.
    """
    plans = prepare(settings).plans
    for name, plan in plans.items():
        if plan.consistency.mode != "partial_reduce":
            raise DocumentError(
                f"methods.{name}: isolation needs mode partial_reduce, not {plan.consistency.mode}; "
                "select methods with methods=groups or only.methods"
            )
    return IsolationResult(
        settings=settings,
        rows=tuple(
            IsolationRow(speed, name, *(_formed(settings, speed, plan.consistency, ruled) for ruled in (True, False)))
            for speed in settings.chosen_speeds
            for name, plan in plans.items()
        ),
    )


def _formed(settings: ConvergenceSettings, speed: str, consistency: Consistency, ruled: bool) -> GroupStatistics:
    bound = consistency.isolation or BOUND
    found = [_rehearsal(settings, speed, consistency, ruled, seed) for seed in range(settings.seeds)]
    spans = [unconnected_windows([group.members for group in one.groups], settings.workers, bound) for one in found]
    return GroupStatistics(
        bridging=statistics.mean(one.bridging for one in found),
        windows=sum(windows for _, windows in spans),
        apart=sum(apart for apart, _ in spans),
        idle=statistics.mean(one.idle for one in found),
    )


def _rehearsal(
    settings: ConvergenceSettings, speed: str, consistency: Consistency, ruled: bool, seed: int
) -> SimulatedGroups:
    assert settings.isolation is not None
    grouping = Grouping.of(consistency)
    if not ruled:
        grouping = Grouping(grouping.size, grouping.wait, IsolationGuard(None))
    compute = [_steps(settings, speed, seed, rank) for rank in range(settings.workers)]
    return simulate(grouping, compute, settings.isolation.groups, settings.isolation.exchange)


def _steps(settings: ConvergenceSettings, speed: str, seed: int, rank: int) -> Callable[[], float]:
    """A function that draws the seconds of a worker's next step."""
    assert settings.isolation is not None
    assert settings.pace is not None
    pace, jitter = settings.pace, settings.isolation.jitter
    drawn = random.Random(f"{seed}/{rank}")
    straggler = Straggler(StragglerSettings(slowdowns=settings.speeds[speed], seed=seed), rank)
    return lambda: (pace + straggler.delay(pace)) * drawn.uniform(1 - jitter, 1 + jitter)


def survey_table(survey: IsolationResult) -> Table:
    """One row per method and speed."""
    settings = survey.settings
    assert settings.isolation is not None
    title = f"{settings.isolation.groups} groups of {settings.workers} workers, {settings.seeds} seeds"
    headings = ("forced", "windows", "apart", "idle", "apart, no rule", "idle, no rule", "points of idle time")
    table = numbers_table(title, ("speeds", "method"), headings)
    for row in survey.rows:
        ruled, free = row.ruled, row.free
        table.add_row(
            row.speed,
            row.method,
            f"{ruled.bridging:.1%}",
            str(ruled.windows),
            str(ruled.apart),
            f"{ruled.idle:.1%}",
            f"{free.apart / free.windows:.0%}" if free.windows else "?",
            f"{free.idle:.1%}",
            f"{100 * (ruled.idle - free.idle):+.1f}",
        )
    return table


def survey_remarks(survey: IsolationResult) -> list[str]:
    """Explanations of the table."""
    settings = survey.settings
    assert settings.isolation is not None
    assert settings.pace is not None
    return [
        f"simulated with the real rules: steps of {settings.pace * 1e3:g} ms ± {settings.isolation.jitter:.0%}, "
        f"averages of {settings.isolation.exchange * 1e3:g} ms",
        "forced: share of groups formed to connect workers; apart: windows of twice the bound whose groups left "
        "workers unconnected",
        "idle: share of the workers' time spent waiting for a group to form; no rule: first come, first served",
    ]
