"""Workers that are slowed down on purpose, to measure the cost of unequal machines on equal ones."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Annotated

from pydantic import Field, PositiveFloat, model_validator
from typing_extensions import Self

from lightning_autosync.documents import Index, Record


class Slowdown(Record):
    """Some ranks are slower for some steps.

    Attributes:
        ranks: slow ranks; None means all.
        factor: factor on the seconds of a step's computation.
        pause_probability: probability of an additional pause in a step.
        pause: mean seconds of a pause, which is drawn from an exponential distribution.
        begin: first slow step, counted from 0.
        end: first step that is no longer slow; None for no end.
    """

    ranks: Annotated[tuple[Index, ...], Field(min_length=1)] | None = None
    factor: Annotated[float, Field(ge=1)] = 1.0
    pause_probability: Annotated[float, Field(ge=0, le=1)] = 0.0
    pause: PositiveFloat | None = None
    begin: Index = 0
    end: Index | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.pause_probability > 0) is (self.pause is None):
            raise ValueError("pause and pause_probability: set both or neither")
        if self.end is not None and self.end <= self.begin:
            raise ValueError(f"end: {self.end} must be above begin {self.begin}")
        return self

    def holds(self, rank: int, step: int) -> bool:
        """Whether ``rank`` is slowed in ``step``."""
        within = self.begin <= step and (self.end is None or step < self.end)
        return within and (self.ranks is None or rank in self.ranks)


class StragglerSettings(Record):
    """Which ranks are slow, when, and by how much. Factors of several slowdowns multiply, and their pauses add up.

    Attributes:
        slowdowns: slowdowns in any order.
        seed: seed of the pauses; every rank draws its own.
    """

    slowdowns: tuple[Slowdown, ...] = ()
    seed: Index = 0


class Straggler:
    """Slows down one rank. Call it once per step with the seconds of the step's computation.

    Args:
        settings: settings, the same on all ranks.
        sleep: function that waits for some seconds; tests replace it.
    """

    def __init__(self, settings: StragglerSettings, rank: int, sleep: Callable[[float], object] = time.sleep) -> None:
        self._slowdowns = settings.slowdowns
        self._rank = rank
        self._random = random.Random(f"{settings.seed}/{rank}")
        self._sleep = sleep
        self._step = 0

    def __call__(self, compute: float) -> float:
        """Sleep for the delay of this step; returns its seconds."""
        delay = self.delay(compute)
        if delay > 0:
            self._sleep(delay)
        return delay

    def delay(self, compute: float) -> float:
        """Seconds of the next step's delay; counts the step."""
        factor, pauses = 1.0, 0.0
        for slowdown in self._slowdowns:
            # Draw even if unused, so that a rank's pauses do not depend on when other slowdowns begin.
            chance, length = self._random.random(), self._random.expovariate(1.0)
            if slowdown.holds(self._rank, self._step):
                factor *= slowdown.factor
                if slowdown.pause is not None and chance < slowdown.pause_probability:
                    pauses += slowdown.pause * length
        self._step += 1
        return compute * (factor - 1.0) + pauses
