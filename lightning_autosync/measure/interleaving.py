"""Contenders take turns, so that drift of the machine's speed affects all alike. Clear losers get few turns."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from lightning_autosync.documents import Configuration, Count
from lightning_autosync.measure.session import Contender, ContenderError, MeasurementSession, reason
from lightning_autosync.measure.step_time import Steps, relative_error
from lightning_autosync.step_times import job_steps, typical_step

State = Literal["running", "complete", "pruned", "failed"]
_MIN_TURNS = 3
"""Turns before a plan is judged; the first turn is a single step."""
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


def alternating_rounds(running: Callable[[], Sequence[_T]]) -> Iterator[Sequence[_T]]:
    """The order of turns in each round: A B C, C B A, A B C, ...

    The first in one round is the last in the next, so a steady drift favours nobody.

    Args:
        running: returns the participants of the next round; the rounds end when it returns none.
    """
    number = 0
    while names := running():
        yield names if number % 2 == 0 else names[::-1]
        number += 1


class TrialSettings(Configuration):
    """How long to measure a plan.

    Attributes:
        warm_up: number of steps that are not counted.
        min_steps: least number of counted steps of a plan, unless it is pruned.
        max_steps: maximum number of counted steps of a plan.
        error: relative standard error of the median at which a plan is complete before ``max_steps``.
        turn: approximate seconds of a plan's turn, after which the next plan of its batch has its turn.
        prune_after: number of steps after which a plan may be pruned as slower than the best.
        margin: relative slowdown of a plan's fastest step, compared with the best, above which it is pruned then.
        max_slowdown: ratio of a plan's fastest step to the best above which it is pruned at once. As long as there is
            no best, the reference stands in for it.
    """

    RENAMED: ClassVar[Mapping[str, str]] = {"least": "min_steps", "most": "max_steps", "hopeless": "max_slowdown"}

    warm_up: Count = 2
    min_steps: Count = 5
    max_steps: Count = 20
    error: PositiveFloat = 0.01
    turn: PositiveFloat = 0.3
    prune_after: Count = 3
    margin: NonNegativeFloat = 0.1
    max_slowdown: Annotated[float, Field(gt=1)] = 2.5

    @model_validator(mode="after")
    def _check(self) -> TrialSettings:
        if self.max_steps < self.min_steps:
            raise ValueError(f"max_steps: {self.max_steps} is less than min_steps, {self.min_steps}")
        return self


@dataclass(eq=False)
class TrialMeasurement:
    """The measurement of one contender, turn by turn.

    Attributes:
        steps: seconds of the steps so far, by rank.
        turns: number of turns so far.
        state: ``running`` until it is decided.
        why: reason why the contender failed or was pruned.
        elapsed: seconds of the run spent on it.
        is_reference: whether it is the reference: never pruned, and never counted as the best.
    """

    contender: Contender
    steps: list[list[float]] = field(default_factory=list)
    turns: int = 0
    state: State = "running"
    why: str | None = None
    elapsed: float = 0.0
    is_reference: bool = False

    @property
    def of_job(self) -> Sequence[float]:
        """The steps of the job, as by `job_steps`."""
        return job_steps(self.steps)

    @property
    def seconds(self) -> float | None:
        """Seconds of a step, as by `step_time`; None before the first step."""
        return typical_step(self.of_job) if self.count else None

    @property
    def count(self) -> int:
        """Number of steps so far."""
        return len(self.of_job)

    def add(self, found: Steps) -> None:
        """Append the steps of a turn."""
        self.turns += 1
        self.steps = [[*before, *new] for before, new in zip(self.steps or [[] for _ in found], found, strict=True)]

    def end(self, state: State, why: str | None = None) -> None:
        """End the measurement in this state."""
        self.state, self.why = state, why


class StoppingRule:
    """Decides when a measurement is done.

    Nothing is decided after a single turn, since other processes may have disturbed all of it. The exception is a step
    that takes as long as a turn.

    Args:
        best: seconds of the fastest plan so far; None if there is none.
        reference: seconds of the reference plan, with which plans are compared until there is a best plan.
    """

    def __init__(self, settings: TrialSettings, best: float | None = None, reference: float | None = None) -> None:
        self._settings = settings
        self._reference = reference
        self.best = best

    @property
    def turn_seconds(self) -> float:
        """Approximate seconds of a turn."""
        return self._settings.turn

    def turn(self, measurement: TrialMeasurement) -> int:
        """Number of steps in the next turn: one in the first turn, then as many as fill a turn."""
        if measurement.seconds is None:
            return 1
        wanted = math.ceil(self._settings.turn / measurement.seconds)
        return min(wanted, self._settings.min_steps, self._settings.max_steps - measurement.count)

    def decide(self, measurement: TrialMeasurement) -> None:
        """End a measurement that is precise enough or clearly slower than the best; ``best`` is updated."""
        seconds = measurement.seconds
        if seconds is None or (measurement.turns < _MIN_TURNS and seconds < self._settings.turn):
            return
        if why := self._lost(measurement):
            measurement.end("pruned", why)
        elif self._precise(measurement):
            measurement.end("complete")
            if not measurement.is_reference:
                self.best = seconds if self.best is None else min(self.best, seconds)

    def far_slower(self, seconds: float) -> bool:
        """Whether a step of ``seconds`` is far slower than the best, or than the reference if there is no best."""
        return seconds > self._settings.max_slowdown * self._possible

    @property
    def _possible(self) -> float:
        """Seconds of the best plan, else of the reference; infinite if neither is known."""
        known = self._reference if self.best is None else self.best
        return math.inf if known is None else known

    def _lost(self, measurement: TrialMeasurement) -> str | None:
        """Why the contender is pruned; None if it is not."""
        if measurement.is_reference:
            return None
        fastest, chosen = min(measurement.of_job), self._settings
        late = self.best is not None and measurement.count >= chosen.prune_after
        if self.far_slower(fastest) or (late and fastest > (1 + chosen.margin) * self._possible):
            whose = "the reference's" if self.best is None else "the best"
            return f"its fastest step takes {fastest / self._possible:.2f} times {whose}"
        return None

    def _precise(self, measurement: TrialMeasurement) -> bool:
        count, chosen = measurement.count, self._settings
        enough = count >= chosen.min_steps and relative_error(measurement.of_job) <= chosen.error
        return enough or count >= chosen.max_steps


def measure_in_turns(
    session: MeasurementSession,
    measurements: Sequence[TrialMeasurement],
    rule: StoppingRule,
    warm_up: int,
    decided: Callable[[TrialMeasurement], None] | None = None,
) -> None:
    """Measure until every contender is decided. If one fails, the others keep their steps and continue.

    Args:
        measurements: measurements to make; those that are decided already are skipped.
        warm_up: number of steps after each set-up that are not counted.
        decided: called with each measurement when it has ended.

    Raises:
        LaunchError: workers cannot be started again.
    """
    for turns in alternating_rounds(lambda: [one for one in measurements if one.state == "running"]):
        for measurement in turns:
            _take_turn(session, measurement, rule, warm_up)
            if decided is not None and measurement.state != "running":
                decided(measurement)


def _take_turn(session: MeasurementSession, measurement: TrialMeasurement, rule: StoppingRule, warm_up: int) -> None:
    begin = time.perf_counter()
    try:
        if not session.live(measurement.contender):
            _warm_up(session, measurement, rule, warm_up)
        measurement.add(session.measure(measurement.contender, rule.turn(measurement)))
        rule.decide(measurement)
    except ContenderError as error:
        measurement.end("failed", reason(error.failure))
        _log.warning("%s: %s; restarting the workers", measurement.contender.name, measurement.why)
    measurement.elapsed += time.perf_counter() - begin
    if measurement.state != "running":
        session.take_down(measurement.contender)


def _warm_up(session: MeasurementSession, measurement: TrialMeasurement, rule: StoppingRule, steps: int) -> None:
    """Make uncounted steps one by one; a plan that seems far slower than the best makes only one."""
    for _ in range(steps):
        (found,) = job_steps(session.measure(measurement.contender, 1))
        if not measurement.is_reference and rule.far_slower(found) and found > rule.turn_seconds:
            return
