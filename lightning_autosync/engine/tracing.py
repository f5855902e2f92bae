"""Times at which the messages of a step were ready, started and completed on this rank."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

Times = tuple[float | None, ...]
Arrival = tuple[int, int, float]
"""Index of a message in schedule order, place of one of its parameters, and the time of that one's gradient."""


@dataclass(frozen=True)
class StepTrace:
    """One step on one rank. All times but ``origin`` are seconds from the beginning of the step.

    Attributes:
        forward: end of the forward pass; if the caller did not mark it, the time of the first gradient.
        backward: end of the backward pass.
        synchronized: time at which all gradients held their means.
        end: end of the step.
        ready: time at which the last gradient was packed, by message in schedule order; None if some never arrived.
        started: time at which the message was handed to the transport or the backend; None if it took no part.
        completed: time at which this rank had the sum, or the end of the engine's wait if the exchange reports no time
            or the recorder did not ask for it.
        origin: beginning of the step on the clock of this process (``time.perf_counter``).
        waits: (start, end) of each time in which the main thread waited for other ranks after its backward pass. With
            ``overlap="step"``, some of them may lie in the next forward pass.
        overlapped: whether the backward pass ended without a wait, with messages under way.
        computing: CPU seconds of the thread that ran the backward pass, from ``forward`` to ``backward``, messages
            included, but not those of other threads that compute; None if unknown, as where another thread began it.
        arrivals: when each gradient was complete, before it was packed, in this order; empty if the recorder did not
            ask for it.
    """

    forward: float
    backward: float
    synchronized: float
    end: float
    ready: Times
    started: Times
    completed: Times
    origin: float = 0.0
    waits: tuple[tuple[float, float], ...] = ()
    overlapped: bool = False
    computing: float | None = None
    arrivals: tuple[Arrival, ...] = ()

    @property
    def wait(self) -> float:
        """Seconds in which the main thread waited for other ranks after its backward pass."""
        return sum(end - start for start, end in self.waits)


class Recorder:
    """Records the times of one step after another; `Engine.trace` connects it.

    The caller marks the beginning and end of each step, and may mark the end of the forward pass. The engine marks the
    rest.

    Args:
        messages: number of messages in the schedule.
        watches: whether exchanges report when this rank has a sum. That costs CPU time for each message, because the
            backend's thread calls Python then.
        times_gradients: whether each gradient has a time, not only each message. That costs CPU time for each.

    Attributes:
        watches, times_gradients: see above.
    """

    def __init__(self, messages: int, watches: bool = True, times_gradients: bool = False) -> None:
        self._count, self.watches, self.times_gradients = messages, watches, times_gradients
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._ready: list[float | None] = [None] * self._count
        self._started: list[float | None] = [None] * self._count
        self._completed: list[float | None] = [None] * self._count
        self._arrivals: list[Arrival] = []
        self._forward: float | None = None
        self._backward = self._synchronized = 0.0
        self._waits: list[tuple[float, float]] = []
        self._wait_begun: float | None = None
        self._depth = 0
        self._overlapped = False
        self._computing: float | None = None
        self._thread: tuple[int, float] | None = None
        self._origin = time.perf_counter()

    def end(self) -> StepTrace:
        """End the step; returns its times. A wait that goes on counts until now."""
        end = self._now()
        if self._wait_begun is not None:
            self._waits.append((self._wait_begun, end))
            self._wait_begun = None
        return StepTrace(
            forward=self._forward or 0.0,
            backward=self._backward,
            synchronized=self._synchronized,
            end=end,
            ready=tuple(self._ready),
            started=tuple(self._started),
            completed=tuple(self._completed),
            origin=self._origin,
            waits=tuple(self._waits),
            overlapped=self._overlapped,
            computing=self._computing,
            arrivals=tuple(self._arrivals),
        )

    def end_forward(self) -> None:
        """Mark the end of the forward pass; later calls in the same step have no effect."""
        if self._forward is None:
            self._forward = self._now()
            self._thread = threading.get_ident(), time.thread_time()

    def end_backward(self) -> None:
        self._backward = self._now()
        if self._thread is not None and self._thread[0] == threading.get_ident():
            self._computing = time.thread_time() - self._thread[1]

    def begin_wait(self) -> None:
        """Mark the beginning of a wait for other ranks. A wait within another one counts once."""
        if self._wait_begun is None:
            self._wait_begun = self._now()
        self._depth += 1

    def end_wait(self) -> None:
        """Mark the end of the wait that `begin_wait` began; no effect if the step in which it began has ended."""
        self._depth = max(0, self._depth - 1)
        if self._depth == 0 and self._wait_begun is not None:
            self._waits.append((self._wait_begun, self._now()))
            self._wait_begun = None

    def overlap(self) -> None:
        """Mark that the backward pass ended without a wait, with messages under way."""
        self._overlapped = True

    def end_synchronization(self) -> None:
        """Mark the time at which every gradient holds its mean."""
        self._synchronized = self._now()

    def arrive(self, message: int, place: int) -> None:
        """Mark the time at which the gradient of a message's parameter is complete."""
        self._arrivals.append((message, place, self._now()))

    def ready(self, message: int) -> None:
        """Mark the time at which the last gradient of a message is packed."""
        self._ready[message] = self._now()

    def start(self, message: int) -> None:
        """Mark the time at which a message is handed to the transport or the backend."""
        self._started[message] = self._now()

    def complete(self, message: int) -> None:
        """Mark a completed part of a message's sum, on any thread; the last part counts."""
        self._completed[message] = self._now()

    def finish(self, message: int) -> None:
        """Mark the end of the engine's wait for a message; it counts if the exchange does not call `complete`."""
        if self._completed[message] is None:
            self._completed[message] = self._now()

    def _now(self) -> float:
        return time.perf_counter() - self._origin
