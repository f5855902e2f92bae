"""Workers that are slowed on purpose, to measure on equal machines what unequal ones cost."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Annotated

from pydantic import Field, PositiveFloat, model_validator
from typing_extensions import Self

from lightning_autosync.documents import Index, Record


class Slowdown(Record):
    """Some ranks are slower for some time.

    Attributes:
        ranks: who; None means all.
        factor: a step's computation takes this many times as long.
        pause_probability: how likely a step is to pause beside.
        pause: mean seconds of a pause; its length is drawn from an exponential distribution.
        begin: first step (from 0) that it holds for.
        end: first step that it no longer holds for; None means for ever.
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
            raise ValueError("pause: goes with pause_probability; give both or neither")
        if self.end is not None and self.end <= self.begin:
            raise ValueError(f"end: {self.end} must be above begin {self.begin}")
        return self

    def holds(self, rank: int, step: int) -> bool:
        """Whether ``rank`` is slowed in ``step``."""
        within = self.begin <= step and (self.end is None or step < self.end)
        return within and (self.ranks is None or rank in self.ranks)


class StragglerSettings(Record):
    """Which ranks are slow, when, and by how much; factors of several slowdowns multiply, and their pauses add up.

    Attributes:
        slowdowns: in any order.
        seed: of the pauses; every rank draws its own.
    """

    slowdowns: tuple[Slowdown, ...] = ()
    seed: Index = 0


class Straggler:
    """Slows one rank; call it once a step, with the seconds that its computation took.

    Args:
        settings: the same on all ranks.
        rank: whose.
        sleep: how to spend seconds; for tests.
    """

    def __init__(self, settings: StragglerSettings, rank: int, sleep: Callable[[float], object] = time.sleep) -> None:
        self._slowdowns = settings.slowdowns
        self._rank = rank
        self._random = random.Random(f"{settings.seed}/{rank}")
        self._sleep = sleep
        self._step = 0

    def __call__(self, compute: float) -> float:
        """Sleep for as long as this step shall be slower; returns these seconds.

        Args:
            compute: seconds that the step's computation took.
        """
        delay = self.delay(compute)
        if delay > 0:
            self._sleep(delay)
        return delay

    def delay(self, compute: float) -> float:
        """Seconds by which the next step shall be slower; counts the step."""
        factor, pauses = 1.0, 0.0
        for slowdown in self._slowdowns:
            # Drawn even if not used, so that a rank's pauses do not depend on when other slowdowns begin.
            chance, length = self._random.random(), self._random.expovariate(1.0)
            if slowdown.holds(self._rank, self._step):
                factor *= slowdown.factor
                if slowdown.pause is not None and chance < slowdown.pause_probability:
                    pauses += slowdown.pause * length
        self._step += 1
        return compute * (factor - 1.0) + pauses
