"""Contenders take turns, so that a machine whose speed drifts treats all alike; those that lose get few turns."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, Protocol, TypeVar

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from lightning_autosync.documents import Configuration, Count
from lightning_autosync.measure.session import Contender, ContenderError, reason
from lightning_autosync.measure.step_time import Steps, relative_error, slowest_rank

State = Literal["running", "complete", "pruned", "failed"]
_MIN_TURNS = 3
"""Turns before a plan is judged; the first is a single step."""
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


def alternating_rounds(running: Callable[[], Sequence[_T]]) -> Iterator[Sequence[_T]]:
    """Who takes turns in each round: A B C, C B A, A B C, ...

    So whoever goes first in one round goes last in the next, and a steady drift favours nobody.

    Args:
        running: asked before each round who takes part; the rounds end when it is nobody.
    """
    number = 0
    while names := running():
        yield names if number % 2 == 0 else names[::-1]
        number += 1


class TrialSettings(Configuration):
    """How long a plan is measured.

    Attributes:
        warm_up: steps that do not count.
        min_steps: a plan has at least so many steps, unless it is pruned.
        max_steps: a plan has at most so many steps.
        error: relative standard error of the median at which a plan is done before it has ``max_steps``.
        turn: about how many seconds a plan's turn lasts before the next plan of its batch has its turn.
        prune_after: steps after which a plan may be pruned as slower than the best.
        margin: a plan is pruned then if even its fastest step is slower by more than this share.
        max_slowdown: a plan is pruned at once if its fastest step takes more than so many times the best, or the
            reference before there is a best.
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
            raise ValueError(f"max_steps: {self.max_steps} is below min_steps, {self.min_steps}")
        return self


class Session(Protocol):
    """What is asked of live workers here; `MeasurementSession` has it."""

    def measure(self, contender: Contender, steps: int) -> Steps: ...

    def live(self, contender: Contender) -> bool: ...

    def take_down(self, contender: Contender) -> None: ...


@dataclass(eq=False)
class TrialMeasurement:
    """The measurement of one contender, turn by turn.

    Attributes:
        contender: as workers know it.
        steps: seconds of the steps so far, by rank.
        turns: that it had.
        state: ``running`` until it is decided.
        why: the reason why it failed or was pruned.
        elapsed: seconds of the run that it took.
        apart: it is not compared with others: it is never pruned, and others are not pruned for being slower than it.
    """

    contender: Contender
    steps: list[list[float]] = field(default_factory=list)
    turns: int = 0
    state: State = "running"
    why: str | None = None
    elapsed: float = 0.0
    apart: bool = False

    @property
    def slowest(self) -> Sequence[float]:
        """The steps of the slowest rank."""
        return slowest_rank(self.steps)

    @property
    def seconds(self) -> float | None:
        """Seconds of a step, as of `step_time`; None without a step."""
        return statistics.median(self.slowest) if self.count else None

    @property
    def count(self) -> int:
        """Steps so far."""
        return len(self.slowest)

    def add(self, found: Steps) -> None:
        """Append the steps of a turn."""
        self.turns += 1
        self.steps = [[*before, *new] for before, new in zip(self.steps or [[] for _ in found], found, strict=True)]

    def end(self, state: State, why: str | None = None) -> None:
        """Decide it."""
        self.state, self.why = state, why


class StoppingRule:
    """When a measurement is done.

    Nothing is decided after one turn, since other processes may have disturbed all of it; unless one step takes as long
    as a turn.

    Args:
        settings: numbers of steps, and the wanted precision.
        best: seconds of the fastest plan so far; None if there is none.
        reference: seconds of the reference plan. Until there is a best plan, plans are compared with it.
    """

    def __init__(self, settings: TrialSettings, best: float | None = None, reference: float | None = None) -> None:
        self._settings = settings
        self._reference = reference
        self.best = best

    @property
    def turn_seconds(self) -> float:
        """About how long a turn lasts."""
        return self._settings.turn

    def turn(self, measurement: TrialMeasurement) -> int:
        """Steps of its next turn: one in the first turn, then as many as fill a turn."""
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
            if not measurement.apart:
                self.best = seconds if self.best is None else min(self.best, seconds)

    def far_slower(self, seconds: float) -> bool:
        """Whether a step of so many seconds is far slower than the best, or than the reference."""
        return seconds > self._settings.max_slowdown * self._possible

    @property
    def _possible(self) -> float:
        """Seconds of the best plan, or of the reference; infinite where neither is known."""
        known = self._reference if self.best is None else self.best
        return math.inf if known is None else known

    def _lost(self, measurement: TrialMeasurement) -> str | None:
        """Why it is pruned; None if it is not."""
        if measurement.apart:
            return None
        fastest, chosen = min(measurement.slowest), self._settings
        late = self.best is not None and measurement.count >= chosen.prune_after
        if self.far_slower(fastest) or (late and fastest > (1 + chosen.margin) * self._possible):
            whose = "the reference's" if self.best is None else "the best"
            return f"its fastest step takes {fastest / self._possible:.2f} times {whose}"
        return None

    def _precise(self, measurement: TrialMeasurement) -> bool:
        count, chosen = measurement.count, self._settings
        enough = count >= chosen.min_steps and relative_error(measurement.slowest) <= chosen.error
        return enough or count >= chosen.max_steps


def measure_in_turns(
    session: Session, measurements: Sequence[TrialMeasurement], rule: StoppingRule, warm_up: int
) -> None:
    """Measure until each contender is decided. One that fails is ``failed``; the others go on with their steps.

    Args:
        session: the workers.
        measurements: those that are decided already are left alone.
        rule: when each is done.
        warm_up: steps after each set-up that do not count.

    Raises:
        LaunchError: workers cannot be started again.
    """
    for turns in alternating_rounds(lambda: [one for one in measurements if one.state == "running"]):
        for measurement in turns:
            _take_turn(session, measurement, rule, warm_up)


def _take_turn(session: Session, measurement: TrialMeasurement, rule: StoppingRule, warm_up: int) -> None:
    begin = time.perf_counter()
    try:
        if not session.live(measurement.contender):
            _warm_up(session, measurement, rule, warm_up)
        measurement.add(session.measure(measurement.contender, rule.turn(measurement)))
        rule.decide(measurement)
    except ContenderError as error:
        measurement.end("failed", reason(error.failure))
        _log.warning("%s: %s; the workers are started again", measurement.contender.name, measurement.why)
    measurement.elapsed += time.perf_counter() - begin
    if measurement.state != "running":
        session.take_down(measurement.contender)


def _warm_up(session: Session, measurement: TrialMeasurement, rule: StoppingRule, steps: int) -> None:
    """Steps that do not count, one by one; of a plan that seems far slower than the best, one is enough."""
    for _ in range(steps):
        found = max(of_rank[0] for of_rank in session.measure(measurement.contender, 1))
        if not measurement.apart and rule.far_slower(found) and found > rule.turn_seconds:
            return
