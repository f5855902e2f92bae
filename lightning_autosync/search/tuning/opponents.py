"""What a plan has to beat: DDP with the best of its settings, and builders where they are no trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_autosync.errors import DocumentError
from lightning_autosync.plan import compile_plan
from lightning_autosync.plan.builders import build
from lightning_autosync.plan.space import BUILDER, PlanSpace
from lightning_autosync.search.tuning.job import Job
from lightning_autosync.search.tuning.measuring import Course, Rule, measure_in_turns
from lightning_autosync.search.tuning.stage import Stage


@dataclass(frozen=True)
class Opponent:
    """One of them as measured before the search; ``seconds`` are those of a step."""

    name: str
    seconds: float


def best_ddp(job: Job, stage: Stage) -> Opponent:
    """DDP with every combination of the settings' arguments, measured as trials are; the fastest.

    Raises:
        DocumentError: none of them ran; the message says why.
    """
    orders = {options.name: job.ddp_order(options) for options in job.settings.ddp.options()}
    return _fastest("ddp", orders, job, stage)


def best_builder(job: Job, stage: Stage) -> Opponent:
    """The builders that fit the cluster, likewise."""
    space = PlanSpace(job.workload, job.cluster)
    names = [str(point[BUILDER]) for point in space.baselines()]
    plans = {name: build(name, job.workload, job.cluster) for name in names}
    for plan in plans.values():
        compile_plan(plan, job.workload, job.cluster)
    return _fastest("builders", {name: job.plan_order(plan) for name, plan in plans.items()}, job, stage)


def _fastest(what: str, orders: Mapping[str, Mapping[str, Any]], job: Job, stage: Stage) -> Opponent:
    courses = [Course(stage.entrant(name, order)) for name, order in orders.items()]
    rule, size = Rule(job.settings.trial), job.settings.search.batch
    for first in range(0, len(courses), size):
        measure_in_turns(stage, courses[first : first + size], rule, job.settings.trial.warm_up)
    times = {course.entrant.name: seconds for course in courses if (seconds := _complete(course)) is not None}
    if not times:
        raise DocumentError(f"{what}: none of them ran; {_reasons(courses)}")
    name = min(times, key=times.__getitem__)
    return Opponent(name, times[name])


def _complete(course: Course) -> float | None:
    return course.seconds if course.state == "complete" else None


def _reasons(courses: Sequence[Course]) -> str:
    return "; ".join(f"{course.entrant.name}: {course.why}" for course in courses if course.why)
