"""A barrier that the workers reach after different numbers of steps, and the average of their buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Barrier:
    """Those who stand at the barrier, and what they brought.

    Args:
        buffers: rank 0's at the beginning, by name.

    Attributes:
        buffers: as of the last barrier.
        passed: number of barriers so far.
        arrived: for each rank at the barrier, the version of the parameters that it has.
        met: the ranks that were at the last barrier.
    """

    def __init__(self, buffers: dict[str, Tensor]) -> None:
        self.buffers = buffers
        self.passed = 0
        self.arrived: dict[int, int] = {}
        self.met: frozenset[int] = frozenset()
        self._brought: dict[int, tuple[int, Mapping[str, Tensor]]] = {}

    def arrive(self, rank: int, samples: int, since: int, buffers: Mapping[str, Tensor]) -> None:
        """A worker comes, after ``samples`` since the last barrier, with those of its buffers that count."""
        self.arrived[rank] = since
        self._brought[rank] = samples, buffers

    def forget(self, rank: int) -> None:
        """A worker is gone; what it brought counts no more."""
        self.arrived.pop(rank, None)
        self._brought.pop(rank, None)

    def leave(self) -> tuple[dict[int, int], dict[str, Tensor]]:
        """All are there: average what they brought, and begin anew; returns whom, their versions, and the averages."""
        averages = {}
        for name in self.buffers:
            given = [(samples, found[name]) for _, (samples, found) in sorted(self._brought.items()) if name in found]
            if given:
                averages[name] = _average(given)
        self.buffers |= averages
        arrived, self.arrived, self._brought = self.arrived, {}, {}
        self.met = frozenset(arrived)
        self.passed += 1
        return arrived, averages


def _average(given: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Weighted by samples; of a counter the first. Whoever has none counts only where nobody has any."""
    # Zero times an infinity, as in a mask, is not a number.
    given = [pair for pair in given if pair[0]] or given
    first = given[0][1]
    if len(given) == 1 or not first.is_floating_point():
        return first.clone()
    total = sum(samples for samples, _ in given)
    mean = torch.zeros_like(first, dtype=torch.float64)
    for samples, tensor in given:
        mean += (samples / total if total else 1 / len(given)) * tensor.double()
    return mean.to(first.dtype)
