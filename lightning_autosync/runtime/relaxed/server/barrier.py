"""A barrier that the workers reach after different numbers of steps, and the average of their buffers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Barrier:
    """Those who stand at the barrier, and what they brought.

    Args:
        buffers: rank 0's at the beginning, by name.

    Attributes:
        buffers: the average of the last barrier.
        arrived: for each rank at the barrier, the version of the parameters that it has.
    """

    def __init__(self, buffers: dict[str, Tensor]) -> None:
        self.buffers = buffers
        self.arrived: dict[int, int] = {}
        self._brought: dict[int, tuple[int, Mapping[str, Tensor]]] = {}

    def arrive(self, rank: int, samples: int, since: int, buffers: Mapping[str, Tensor]) -> None:
        """A worker comes, after ``samples`` since the last barrier, with floating buffers (if any are kept here)."""
        self.arrived[rank] = since
        self._brought[rank] = samples, buffers

    def forget(self, rank: int) -> None:
        """A worker is gone; what it brought counts no more."""
        self.arrived.pop(rank, None)
        self._brought.pop(rank, None)

    def leave(self) -> dict[int, int]:
        """All are there: average what they brought, and begin anew; returns whom and their versions."""
        total = sum(samples for samples, _ in self._brought.values())
        shares = {
            rank: samples / total if total else 1 / len(self._brought) for rank, (samples, _) in self._brought.items()
        }
        for name, kept in self.buffers.items():
            if kept.is_floating_point():
                mean = torch.zeros_like(kept, dtype=torch.float64)
                for rank in sorted(self._brought):
                    mean += shares[rank] * self._brought[rank][1][name].double()
                self.buffers[name] = mean.to(kept.dtype)
        arrived, self.arrived, self._brought = self.arrived, {}, {}
        return arrived
