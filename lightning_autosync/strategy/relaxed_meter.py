"""`RelaxedMeter`: what the steps of relaxed replicas took and sent on this rank."""

from __future__ import annotations

import time

from lightning_autosync.strategy.tuning.step_meter import StepFigures


class RelaxedMeter:
    """Collects what steps took, until `take` asks for their figures. Meetings, and what comes with them, do not count.

    Figures are means, because many relaxed methods exchange in some steps only. It makes no collective calls.
    """

    def __init__(self) -> None:
        self._begun: tuple[float, int] | None = None
        self._clear()

    def _clear(self) -> None:
        self._steps = self._bytes = 0
        self._seconds = self._waited = 0.0

    def begin(self, sent: int) -> None:
        """Begin the first step after a meeting.

        Args:
            sent: bytes that this process has sent so far.
        """
        self._begun = time.perf_counter(), sent

    def add(self, waited: float, sent: int) -> None:
        """Add a step that ends now.

        Args:
            waited: seconds of it in which the rank waited for other processes.
            sent: bytes that this process has sent so far.
        """
        now = time.perf_counter()
        if self._begun is not None:
            begun, before = self._begun
            self._steps += 1
            self._seconds += now - begun
            self._bytes += sent - before
            self._waited += waited
        self._begun = now, sent

    def take(self) -> StepFigures | None:
        """The figures of the steps since the last call; None if there were none."""
        steps = self._steps
        if not steps:
            return None
        found = StepFigures(
            step_time=self._seconds / steps,
            wait=self._waited / steps,
            bytes=self._bytes / steps,
            overlap=None,
            share_of_bound=None,
            plan_changes=0,
        )
        self._clear()
        return found
