"""Backward passes that are all alike, as ``static_graph=True`` promises."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_autosync.engine.gradients import MessageGradients
from lightning_autosync.errors import ExchangeError


class StaticGraph:
    """Accumulations of each gradient per pass: counted in the first pass, counted down in all later ones."""

    def __init__(self, gradients: Sequence[MessageGradients]) -> None:
        self._gradients = gradients
        self._learned = False
        self._left: dict[MessageGradients, list[int]] = {}

    def begin_pass(self) -> None:
        """Begin a backward pass, in which each message expects the accumulations that the first pass had."""
        self._left = {
            gradients: list(gradients.arrivals) if self._learned else [0] * len(gradients.arrivals)
            for gradients in self._gradients
        }

    def arrived(self, gradients: MessageGradients, place: int) -> bool:
        """Count one accumulation; returns whether the gradient is now complete."""
        left = self._left[gradients]
        if not self._learned:
            left[place] += 1
            return False
        left[place] -= 1
        if left[place] < 0:
            raise ExchangeError(
                f"static_graph=True: the gradient of parameter '{gradients.message.variables[place]}' was accumulated "
                f"more than {gradients.arrivals[place]} times, as often as in the first pass; remove "
                "static_graph=True if the graph changes between steps"
            )
        return left[place] == 0

    def end_pass(self) -> None:
        """End a backward pass. A pass without gradients (see `Engine.synchronize`) does not count as the first."""
        if not self._learned and any(map(any, self._left.values())):
            self._learned = True
            for gradients, counted in self._left.items():
                gradients.arrivals = counted
