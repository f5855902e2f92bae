"""A bar of the trials with the best so far and the time left; lines in the log where there is no terminal."""

from __future__ import annotations

import logging
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_log = logging.getLogger(__name__)


class TuningProgress:
    """Shows how far a run is.

    Args:
        budget: trials in all.
        done: trials that were there before.
        console: where; without a terminal, every batch is a line in the log.
    """

    def __init__(self, budget: int, done: int, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        columns = (
            TextColumn("tuning"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[best]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("tuning", total=budget, completed=done, best="")

    def __enter__(self) -> TuningProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, done: int, best: tuple[int, float] | None, failed: int, ddp: float) -> None:
        """So many trials are done; ``best`` is the number and the seconds of the fastest, ``ddp`` seconds of DDP."""
        text = "no plan has a time yet" if best is None else _best(*best, ddp)
        text += f", {failed} failed" if failed else ""
        self._bar.update(self._task, completed=done, best=text)
        if self._bar.disable:
            task = self._bar.tasks[0]
            _log.info("trial %d of %d: %s", done, task.total, text)


def _best(number: int, seconds: float, ddp: float) -> str:
    return f"best {1e3 * seconds:.1f} ms (trial {number}, {ddp / seconds:.2f}x of DDP's speed)"
