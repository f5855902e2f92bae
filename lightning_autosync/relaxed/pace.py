"""A period between averages that follows what they cost."""

from __future__ import annotations

import math

_MOST_GROWTH = 2
"""Factor by which the period may change at a time: one slow exchange says little."""
_MEMORY = 0.5
"""Weight of the past in the moving averages of times."""


class Pace:
    """The least period at which averaging takes no more than a share of the time.

    With steps of ``s`` seconds and exchanges of ``x``, a period of H spends ``x / (H s + x)`` on exchanges.

    Args:
        period: steps between averages at first.
        overhead: the share of the time that exchanges may take, between 0 and 1.
        longest: the period never exceeds this number of steps.
    """

    def __init__(self, period: int, overhead: float, longest: int) -> None:
        self.period = period
        self.overhead = overhead
        self.longest = longest
        self._step_time = 0.0
        self._exchange_time = 0.0
        self._round: list[tuple[float, float]] = []

    def report(self, step_time: float, exchange_time: float) -> None:
        """One worker's mean seconds a step since the last average, and the seconds that average took."""
        if step_time > 0 and exchange_time > 0:
            self._round.append((step_time, exchange_time))

    def next_period(self) -> int:
        """The period until the next average, from what the slowest worker of this round reported."""
        if self._round:
            slowest = max(step for step, _ in self._round)
            # Whoever came last did not wait, so that the shortest exchange is the one without waiting.
            shortest = min(exchange for _, exchange in self._round)
            self._step_time = _follow(self._step_time, slowest)
            self._exchange_time = _follow(self._exchange_time, shortest)
            self._round = []
            wanted = math.ceil(self._exchange_time * (1 - self.overhead) / (self.overhead * self._step_time))
            lowest, highest = max(1, self.period // _MOST_GROWTH), self.period * _MOST_GROWTH
            self.period = min(max(wanted, lowest), highest, self.longest)
        return self.period

    def state(self) -> dict[str, float]:
        """Plain data; see :meth:`restore`."""
        return {"period": self.period, "step_time": self._step_time, "exchange_time": self._exchange_time}

    def restore(self, period: int, step_time: float, exchange_time: float) -> None:
        """Continue from what :meth:`state` returned."""
        self.period, self._step_time, self._exchange_time = period, step_time, exchange_time


def _follow(average: float, value: float) -> float:
    return value if average == 0 else _MEMORY * average + (1 - _MEMORY) * value
