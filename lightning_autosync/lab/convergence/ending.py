"""When a training ends: after so many steps, or when rank 0 says so."""

from __future__ import annotations

import torch.distributed as dist

_LAST = "last"


class Ending:
    """One rank's view of the end; ask it before each step.

    Rank 0 names its current step as the last one. Those who march in step take that step too, for they cannot have
    finished it without rank 0; the others stop as soon as they know.

    Args:
        store: for this training only.
        rank: the own.
        lock_step: whether all ranks must take equally many steps.
        steps: how many each takes; None waits for rank 0.
    """

    def __init__(self, store: dist.Store, rank: int, lock_step: bool, steps: int | None) -> None:
        self._store, self._rank, self._lock_step, self._steps = store, rank, lock_step, steps
        self._last: int | None = None

    def announce(self, step: int) -> None:
        """Rank 0, before its step ``step`` (from 0), makes it the last."""
        if self._last is None:
            self._last = step
            self._store.set(_LAST, str(step))

    def reached(self, step: int) -> bool:
        """Whether step ``step`` (from 0) is not to be taken."""
        if self._steps is not None:
            return step >= self._steps
        if self._rank != 0 and self._last is None and self._store.check([_LAST]):
            self._last = int(self._store.get(_LAST))
        if self._last is None:
            return False
        return step > self._last or (self._rank != 0 and not self._lock_step)
