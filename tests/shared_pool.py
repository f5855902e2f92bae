"""A pool of worker processes that many tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning_autosync.measure.workers import WorkerPool


class SharedPool:
    """A pool that starts at its first order, and starts again if a test broke it.

    Args:
        world_size: number of ranks.
        paths: additional folders from which workers import.
        timeout: maximum seconds of one call.
    """

    def __init__(self, world_size: int, paths: Sequence[Path], timeout: float) -> None:
        self.world_size, self._paths, self._timeout = world_size, paths, timeout
        self._pool: WorkerPool | None = None

    def run(
        self, function: Callable[..., Any], /, *, ranks: Iterable[int] | None = None, **arguments: Any
    ) -> list[Any]:
        """As :meth:`WorkerPool.run`."""
        return self.live().run(function, ranks=ranks, **arguments)

    def live(self) -> WorkerPool:
        if self._pool is None or self._pool.closed:
            self._pool = WorkerPool(self.world_size, timeout=self._timeout, extra_paths=self._paths, scheduling="batch")
        return self._pool

    def __enter__(self) -> SharedPool:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.close()
