"""How long plans are measured: in turns with others, until their median is known, and losers no longer than needed."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lightning_autosync.learned.dataset.sample import step_noise
from lightning_autosync.measure.bench.interleaving import turn_order
from lightning_autosync.search.tuning.settings import TrialSettings
from lightning_autosync.search.tuning.stage import Entrant, Stage, Steps, TrialError

State = Literal["running", "complete", "pruned", "failed"]
_LEAST_TURNS = 3
"""The first of which is a single step."""


@dataclass(eq=False)
class Course:
    """One plan under measurement.

    Attributes:
        entrant: as workers know it.
        steps: seconds of the steps so far, by rank.
        turns: that it had.
        state: ``running`` until it is decided.
        why: it failed or was pruned.
        elapsed: seconds of the run that it took.
        apart: it is measured beside the others but not compared with them: it is never given up as slow, and nobody is
            given up for being slower than it.
    """

    entrant: Entrant
    steps: list[list[float]] = field(default_factory=list)
    turns: int = 0
    state: State = "running"
    why: str | None = None
    elapsed: float = 0.0
    apart: bool = False

    @property
    def slowest(self) -> Sequence[float]:
        """The steps of the rank whose median is highest."""
        return max(self.steps, key=statistics.median, default=())

    @property
    def seconds(self) -> float | None:
        """Seconds of a step: the median, of the slowest rank; None without a step."""
        return statistics.median(self.slowest) if self.count else None

    @property
    def count(self) -> int:
        return len(self.slowest)

    @property
    def error(self) -> float:
        """Standard error of `seconds` over `seconds`; infinite with one step."""
        return relative_error(self.slowest)

    def add(self, found: Steps) -> None:
        """Take in what a turn gave."""
        self.turns += 1
        self.steps = [[*before, *new] for before, new in zip(self.steps or [[] for _ in found], found, strict=True)]

    def end(self, state: State, why: str | None = None) -> None:
        """Decide it."""
        self.state, self.why = state, why


def relative_error(steps: Sequence[float]) -> float:
    """Standard error of the median over the median (`step_noise`); infinite with one step."""
    return step_noise(steps) if len(steps) > 1 else math.inf


class Rule:
    """When a plan is done.

    Nothing is decided on one turn alone, since a burst of foreign load may fill it, unless a step is as long as a turn.

    Args:
        settings: numbers of steps, and how sure to be.
        best: seconds of the fastest so far; None where nothing is known.
        seen: seconds of the reference; until there is a best one, plans that take a multiple of it are hopeless.
    """

    def __init__(self, settings: TrialSettings, best: float | None = None, seen: float | None = None) -> None:
        self._settings = settings
        self._seen = seen
        self.best = best

    @property
    def turn_seconds(self) -> float:
        """How long a turn lasts, about."""
        return self._settings.turn

    def turn(self, course: Course) -> int:
        """Steps of its next turn: one to begin with, then as many as fill a turn."""
        if course.seconds is None:
            return 1
        wanted = math.ceil(self._settings.turn / course.seconds)
        return min(wanted, self._settings.least, self._settings.most - course.count)

    def decide(self, course: Course) -> None:
        """End a course that is done or a clear loser; ``best`` follows those that are done."""
        seconds = course.seconds
        if seconds is None or (course.turns < _LEAST_TURNS and seconds < self._settings.turn):
            return
        if why := self._lost(course):
            course.end("pruned", why)
        elif self._sure(course):
            course.end("complete")
            if not course.apart:
                self.best = seconds if self.best is None else min(self.best, seconds)

    def hopeless(self, seconds: float) -> bool:
        """Whether a step of so many seconds shows that a plan is no match."""
        return seconds > self._settings.hopeless * self._usual

    @property
    def _usual(self) -> float:
        """Seconds that are known to be possible; infinite where nothing is known."""
        known = self._seen if self.best is None else self.best
        return math.inf if known is None else known

    def _lost(self, course: Course) -> str | None:
        """Why a course is a clear loser; None if it is not."""
        if course.apart:
            return None
        fastest, chosen = min(course.slowest), self._settings
        late = self.best is not None and course.count >= chosen.prune_after
        if self.hopeless(fastest) or (late and fastest > (1 + chosen.margin) * self._usual):
            whose = "the reference's" if self.best is None else "the best"
            return f"its fastest step takes {fastest / self._usual:.2f} times {whose}"
        return None

    def _sure(self, course: Course) -> bool:
        chosen = self._settings
        return course.count >= chosen.most or (course.count >= chosen.least and course.error <= chosen.error)


def measure_in_turns(
    stage: Stage,
    courses: Sequence[Course],
    rule: Rule,
    warm_up: int,
    watch: Callable[[Course], None] | None = None,
) -> None:
    """Measure courses until each is decided: A B C, C B A, A B C, ...

    A course whose plan fails is ``failed``; the others go on with the steps that they have.

    Args:
        stage: the workers.
        courses: to measure; those decided already are left alone.
        rule: when each is done.
        warm_up: steps after each set-up that do not count.
        watch: told after each turn.

    Raises:
        LaunchError: workers cannot be started again.
    """
    number = 0
    while running := [course for course in courses if course.state == "running"]:
        for course in _in_turn(running, number):
            _take_turn(stage, course, rule, warm_up)
            if watch is not None:
                watch(course)
        number += 1


def _in_turn(running: list[Course], number: int) -> list[Course]:
    by_name = {course.entrant.name: course for course in running}
    return [by_name[name] for name in turn_order(list(by_name), number)]


def _take_turn(stage: Stage, course: Course, rule: Rule, warm_up: int) -> None:
    begin = time.perf_counter()
    try:
        if not stage.live(course.entrant):
            _warm_up(stage, course, rule, warm_up)
        course.add(stage.measure(course.entrant, rule.turn(course)))
        rule.decide(course)
    except TrialError as error:
        course.end("failed", str(error))
    course.elapsed += time.perf_counter() - begin
    if course.state != "running":
        stage.take_down(course.entrant)


def _warm_up(stage: Stage, course: Course, rule: Rule, steps: int) -> None:
    """Steps that do not count, one by one: of a plan that seems to be no match, the first one is enough."""
    for _ in range(steps):
        found = max(of_rank[0] for of_rank in stage.measure(course.entrant, 1))
        if not course.apart and rule.hopeless(found) and found > rule.turn_seconds:
            return
