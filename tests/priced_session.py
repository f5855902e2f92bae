"""A measurement session without workers: steps take what a function of the order says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from typing_extensions import Self

from lightning_autosync.measure.probe.hosts import host_costs
from lightning_autosync.measure.session import Contender, ContenderError
from lightning_autosync.measure.workers import WorkerError
from lightning_autosync.replay import Constants

Price = Callable[[str, Mapping[str, Any]], float]


class PricedSession:
    """Counts what is asked of it. A price of infinity is a worker that dies, after which all contenders are gone.

    Args:
        price: seconds of a step, by the contender's name and order.
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

    def run(self, function: Callable[..., Any]) -> list[Any]:
        """Workers that cannot measure what their hosts cost."""
        assert function is host_costs
        return [Constants().to_dict()]

    def live(self, contender: Contender) -> bool:
        return id(contender) in self._alive

    def measure(self, contender: Contender, steps: int) -> list[list[float]]:
        self.turns.append((contender.name, steps))
        seconds = self._price(contender.name, contender.order)
        if seconds == float("inf"):
            self._alive.clear()
            self.restarts += 1
            raise ContenderError(contender.name, WorkerError(f"rank 1 died while {contender.name} ran", 1))
        self._alive.add(id(contender))
        return [[seconds * (1 + rank / 100)] * steps for rank in range(self._ranks)]

    def take_down(self, contender: Contender) -> None:
        self._alive.discard(id(contender))
        self.taken_down.append(contender.name)
