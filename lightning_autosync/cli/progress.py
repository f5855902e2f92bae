"""The progress of long verbs: a bar of one line on a terminal, else a line of the log now and then."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

PACE = 10.0
"""Least seconds between two lines of the log. The first and the last piece of work always have one."""
_REFRESHES = 2
"""Redraws of the bar in a second, however fast the work is; slow terminals bear no more."""
_BAR = 12
"""Width of the bar in characters."""
_log = logging.getLogger(__name__)


class ShownProgress:
    """Shows how far a verb is, within a ``with`` block; a `lightning_autosync.measure.progress.Report`.

    On a terminal it is a bar of one line, as wide as the terminal at most; lines of the log go above it. Elsewhere, and
    on terminals that cannot move the cursor, it is a line of the log every `PACE` seconds at most.

    Args:
        verb: what is under way, in one word.
        console: console to draw on; None is standard error.
        clock: gives seconds.
    """

    def __init__(self, verb: str, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._verb = verb
        self._clock = clock
        self._shown = -PACE
        self._handlers: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []
        console = console or Console(stderr=True)
        text = TextColumn(
            "{task.fields[text]}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
        )
        columns = (TextColumn(verb), BarColumn(_BAR), MofNCompleteColumn(), text, TimeRemainingColumn(compact=True))
        drawn = console.is_terminal and not console.is_dumb_terminal
        self._bar = Progress(
            *columns, console=console, disable=not drawn, expand=True, refresh_per_second=_REFRESHES, transient=True
        )
        self._task = self._bar.add_task(verb, total=None, text="")

    def __enter__(self) -> ShownProgress:
        before = (sys.stdout, sys.stderr)
        self._bar.start()
        if not self._bar.disable:
            self._redirect(before)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handler, stream in self._handlers:
            handler.setStream(stream)
        self._handlers.clear()
        self._bar.stop()

    def __call__(self, done: int, total: int, text: str) -> None:
        """Show that ``done`` of ``total`` pieces are finished, with a few words on the last one."""
        if not self._bar.disable:
            self._bar.update(self._task, completed=done, total=total, text=text)
            return
        now = self._clock()
        if done >= total or now - self._shown >= PACE:
            self._shown = now
            _log.info("%s: %d of %d%s", self._verb, done, total, f": {text}" if text else "")

    def _redirect(self, streams: tuple[TextIO, TextIO]) -> None:
        """Have the log's handlers write to rich's stand-ins for standard output and error, which spare the bar."""
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream in streams:
                self._handlers.append((handler, handler.stream))
                handler.setStream(sys.stdout if handler.stream is streams[0] else sys.stderr)
