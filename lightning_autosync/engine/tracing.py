"""When the messages of a step were ready, started and completed on this rank."""

from __future__ import annotations

import time
from dataclasses import dataclass

Times = tuple[float | None, ...]


@dataclass(frozen=True)
class StepTrace:
    """One step on one rank; seconds from its beginning.

    Attributes:
        forward: end of the forward pass, or the first gradient if nobody marked it.
        backward: end of the backward pass.
        synchronized: when all gradients held their means.
        end: of the step.
        ready: for each message of the schedule, when its last gradient was packed; None if it did not come in backward.
        started: for each message, when it was handed to the transport or the backend; None if it took no part.
        completed: for each message, when this rank had the sum. Exchanges that do not tell have the time at which the
            engine had waited for them.
    """

    forward: float
    backward: float
    synchronized: float
    end: float
    ready: Times
    started: Times
    completed: Times


class Recorder:
    """Takes the times of one step after another; `Engine.trace` connects it.

    The caller marks where a step begins and ends, and may mark where its forward pass ends; the engine does the rest.

    Args:
        messages: how many the schedule has.
    """

    def __init__(self, messages: int) -> None:
        self._count = messages
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._ready: list[float | None] = [None] * self._count
        self._started: list[float | None] = [None] * self._count
        self._completed: list[float | None] = [None] * self._count
        self._forward: float | None = None
        self._backward = self._synchronized = 0.0
        self._origin = time.perf_counter()

    def end(self) -> StepTrace:
        """The step has ended."""
        end = self._now()
        return StepTrace(
            forward=self._forward or 0.0,
            backward=self._backward,
            synchronized=self._synchronized,
            end=end,
            ready=tuple(self._ready),
            started=tuple(self._started),
            completed=tuple(self._completed),
        )

    def end_forward(self) -> None:
        """The forward pass has ended; later calls in the same step change nothing."""
        if self._forward is None:
            self._forward = self._now()

    def end_backward(self) -> None:
        self._backward = self._now()

    def end_synchronization(self) -> None:
        """Every gradient holds its mean."""
        self._synchronized = self._now()

    def ready(self, message: int) -> None:
        """The last gradient of a message is packed."""
        self._ready[message] = self._now()

    def start(self, message: int) -> None:
        """A message is handed to the transport or the backend."""
        self._started[message] = self._now()

    def complete(self, message: int) -> None:
        """A part of a message's sum is there; the last part counts. Called on any thread."""
        self._completed[message] = self._now()

    def finish(self, message: int) -> None:
        """The engine has waited for a message; counts if its exchange does not call `complete`."""
        if self._completed[message] is None:
            self._completed[message] = self._now()

    def _now(self) -> float:
        return time.perf_counter() - self._origin
