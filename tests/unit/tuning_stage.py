"""A stage without workers: steps take what a function of the order says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from typing_extensions import Self

from lightning_autosync.search.tuning.stage import Entrant, TrialError

Price = Callable[[str, Mapping[str, Any]], float]


class PricedStage:
    """Counts what is asked of it. A price of infinity is a worker that dies, after which all entrants are gone.

    Args:
        price: seconds of a step, by the entrant's name and order.
        ranks: each rank is 1% slower than the one before.
    """

    def __init__(self, price: Price, ranks: int = 2) -> None:
        self._price = price
        self._ranks = ranks
        self._alive: set[int] = set()
        self.restarts = 0
        self.turns: list[tuple[str, int]] = []
        self.taken_down: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._alive.clear()

    def entrant(self, name: str, order: Mapping[str, Any]) -> Entrant:
        return Entrant(name, order)

    def live(self, entrant: Entrant) -> bool:
        return id(entrant) in self._alive

    def measure(self, entrant: Entrant, steps: int) -> list[list[float]]:
        self.turns.append((entrant.name, steps))
        seconds = self._price(entrant.name, entrant.order)
        if seconds == float("inf"):
            self._alive.clear()
            self.restarts += 1
            raise TrialError(f"rank 1 died while {entrant.name} ran")
        self._alive.add(id(entrant))
        return [[seconds * (1 + rank / 100)] * steps for rank in range(self._ranks)]

    def take_down(self, entrant: Entrant) -> None:
        self._alive.discard(id(entrant))
        self.taken_down.append(entrant.name)
