"""Coordinate descent over the choices of a model: single choices and pairs of adjacent ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

from lightning_autosync.hybrid.cost import Costs, memory_bytes, step_seconds
from lightning_autosync.hybrid.tables import Tables

_TOLERANCE = 1e-9
_OVERFULL = 1e3
"""Penalty in seconds of a plan that does not fit into memory, times its memory relative to the limit."""


class Descent:
    """Minimizes the seconds of a step; plans that fit into memory come before all others.

    Args:
        memory: bytes that a rank may use; None for no limit.
        overlap: whether the synchronization of gradients overlaps with the backward pass.
        fixed: choices that must not change.
    """

    def __init__(
        self, tables: Tables, memory: float | None = None, overlap: bool = True, fixed: Sequence[int] = ()
    ) -> None:
        self._alone = tables.alone
        self._memory = memory
        self._overlap = overlap
        self._around: dict[int, list[tuple[int, Costs]]] = defaultdict(list)
        for (one, other), table in tables.pairs.items():
            self._around[one].append((other, table))
            self._around[other].append((one, table.swapaxes(0, 1)))
        free = [number for number in range(len(self._alone)) if number not in set(fixed)]
        self._free = free
        self._pairs = [pair for pair in tables.pairs if not set(pair) & set(fixed)]
        self._tables = tables

    def objective(self, costs: Costs) -> NDArray[numpy.float64]:
        """[...] the objective: seconds of a step, plus a penalty for plans that do not fit into memory."""
        seconds = step_seconds(costs, self._overlap)
        if self._memory is None:
            return seconds
        over = numpy.maximum(memory_bytes(costs) / self._memory - 1, 0.0)
        return seconds + numpy.where(over > 0, _OVERFULL * (1 + over), 0.0)

    def run(self, start: Sequence[int]) -> tuple[tuple[int, ...], float]:
        """Descend to a local optimum, which no change of one or of two adjacent choices improves.

        Args:
            start: index of the alternative of each choice.

        Returns:
            The alternatives of the optimum, and its objective.
        """
        choice = list(start)
        while True:
            # Recompute the total: incremental updates by large penalties of illegal choices leave rounding errors.
            total = self._tables.total(choice)
            before = best = float(self.objective(total))
            for number in self._free:
                total, best = self._improve_one(choice, number, total, best)
            for pair in self._pairs:
                total, best = self._improve_two(choice, pair, total, best)
            if best >= before * (1 - _TOLERANCE):
                return tuple(choice), before

    def _improve_one(self, choice: list[int], number: int, total: Costs, best: float) -> tuple[Costs, float]:
        part = self._part(choice, number, ())
        totals = total - part[choice[number]] + part
        found = self.objective(totals)
        state = int(found.argmin())
        if found[state] < best * (1 - _TOLERANCE):
            choice[number] = state
            return totals[state], float(found[state])
        return total, best

    def _improve_two(self, choice: list[int], pair: tuple[int, int], total: Costs, best: float) -> tuple[Costs, float]:
        one, other = pair
        part = self._part(choice, one, (other,))[:, None] + self._part(choice, other, (one,))[None]
        part = part + self._tables.pairs[pair]
        totals = total - part[choice[one], choice[other]] + part
        found = self.objective(totals)
        place = numpy.unravel_index(int(found.argmin()), found.shape)
        if found[place] < best * (1 - _TOLERANCE):
            choice[one], choice[other] = (int(state) for state in place)
            return totals[place], float(found[place])
        return total, best

    def _part(self, choice: Sequence[int], number: int, without: Sequence[int]) -> Costs:
        """[alternatives, COSTS] costs that depend on one choice, with all others fixed."""
        part = self._alone[number]
        for other, table in self._around[number]:
            if other not in without:
                part = part + table[:, choice[other]]
        return part
