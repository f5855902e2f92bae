"""Drift of the machine: a reference plan, measured again with every batch, tells how fast everything was just then."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

THRESHOLD = 0.05
"""Spread of the smoothed reference from which on times are compared relative to it."""
WINDOW = 5
"""Turns of the reference whose running median is taken: a lone slow turn is no drift."""


@dataclass(frozen=True)
class Drift:
    """What the reference's turns say.

    Attributes:
        turns: seconds of a step of the reference by the number of the trial that it was measured with, ascending.
    """

    turns: Mapping[int, float]

    @cached_property
    def level(self) -> float | None:
        """Seconds of the reference, over the whole run."""
        return statistics.median(self.turns.values()) if self.turns else None

    @cached_property
    def spread(self) -> float:
        """By how much the slowest stretch was slower than the fastest."""
        smooth = list(self._smooth.values())
        return max(smooth) / min(smooth) - 1 if smooth else 0.0

    @property
    def seen(self) -> bool:
        """Whether times are compared relative to the reference."""
        return self.spread > THRESHOLD

    def corrected(self, number: int, seconds: float) -> float:
        """The seconds of a trial as they would have been at the reference's `level`; as they are without drift."""
        if not self.seen:
            return seconds
        level = self.level
        assert level is not None
        return seconds * level / self._at(number)

    def expected(self, seconds: float) -> float:
        """The other way round: what corrected seconds are at the latest turn of the reference.

        They are no less than that turn by itself says, for whoever is given up as slow should be slow either way.
        """
        if self.level is None:
            return seconds
        latest = max(self.turns)
        alone = self.turns[latest] / self.level
        if not self.seen:
            return seconds * alone if alone > 1 + THRESHOLD else seconds
        return seconds * max(alone, self._at(latest) / self.level)

    def bring(self, stretch: Drift, number: int, seconds: float) -> float:
        """Seconds of another stretch of time, during which the same reference was measured, on this one's footing.

        They are corrected within that stretch as `corrected` does it, and brought from its level to this one's where
        the two differ by more than a spread that counts.
        """
        found = stretch.corrected(number, seconds)
        if self.level is None or stretch.level is None:
            return found
        ratio = self.level / stretch.level
        return found * ratio if max(ratio, 1 / ratio) - 1 > THRESHOLD else found

    def to_dict(self) -> dict[str, Any]:
        """All of it, as plain data."""
        return {
            "seen": self.seen,
            "spread": self.spread,
            "threshold": THRESHOLD,
            "ranked_by": "seconds relative to the reference" if self.seen else "seconds as measured",
            "reference_seconds": self.level,
            "reference_by_trial": {str(number): seconds for number, seconds in self.turns.items()},
        }

    def _at(self, number: int) -> float:
        """The smoothed reference at a trial: the last turn up to it, or the first of all."""
        turns = list(self._smooth)
        return self._smooth[turns[max(0, bisect_right(turns, number) - 1)]]

    @cached_property
    def _smooth(self) -> dict[int, float]:
        numbers = sorted(self.turns)
        return {number: _around([self.turns[n] for n in numbers], place) for place, number in enumerate(numbers)}


class Footing:
    """Seconds of trials of several runs on the footing of one, by the reference that all of them measure.

    Args:
        turns: by run the seconds of the reference, as of `Drift`.
        run: on whose footing the seconds are.
    """

    def __init__(self, turns: Mapping[str | None, Mapping[int, float]], run: str | None) -> None:
        self._stretches = {name: Drift(found) for name, found in turns.items()}
        self.base = self._stretches.get(run, Drift({}))

    def bring(self, run: str | None, number: int, seconds: float) -> float:
        """The seconds that a trial of some run would have taken in the one; as they are where it has no reference."""
        return self.base.bring(self._stretches.get(run, Drift({})), number, seconds)


def _around(values: Sequence[float], place: int) -> float:
    """The median of the window around a place, shorter at the ends."""
    half = WINDOW // 2
    return statistics.median(values[max(0, place - half) : place + half + 1])
