"""Lines of the log appear above progress bars, not in them."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from lightning_utilities.core import rank_zero
from rich.console import Console
from rich.progress import Progress
from tqdm import tqdm

from lightning_autosync.strategy.log import rank_zero_info


@contextmanager
def terminal() -> Iterator[io.StringIO]:
    """What a terminal gets from this process, whose logger has the handler that Lightning's has after its import."""
    screen, logger = io.StringIO(), logging.Logger("log of a job")
    handler = logging.StreamHandler(screen)
    logger.addHandler(handler)
    with (
        mock.patch.object(rank_zero, "log", logger),
        mock.patch.object(rank_zero.rank_zero_only, "rank", 0, create=True),
        mock.patch.object(sys, "stderr", screen),
        mock.patch.object(sys, "__stderr__", screen),
    ):
        yield screen
    assert handler.stream is screen


def test_a_line_is_above_a_bar_of_rich() -> None:
    with terminal() as screen:
        console = Console(file=screen, force_terminal=True, width=60)
        with Progress(console=console, auto_refresh=False) as progress:
            progress.add_task("Epoch 0", total=4)
            progress.refresh()
            before = len(screen.getvalue())
            rank_zero_info("AutoSync: a line")
            written = screen.getvalue()[before:]
    erased, line, bar = written.index("\x1b[2K"), written.index("AutoSync: a line\n"), written.index("Epoch 0")
    assert erased < line < bar


def test_a_line_is_above_a_bar_of_tqdm() -> None:
    with terminal() as screen, tqdm(total=4, desc="Epoch 0", file=screen, ascii=True, ncols=60) as bar:
        bar.refresh()
        before = len(screen.getvalue())
        rank_zero_info("AutoSync: a line")
        cleared, line, drawn = screen.getvalue()[before:].rpartition("AutoSync: a line\n")
    assert line
    assert cleared.endswith("\r")
    assert not cleared.strip()
    assert "Epoch 0" in drawn


def test_without_a_bar_a_line_is_all() -> None:
    with terminal() as screen:
        rank_zero_info("AutoSync: a line")
    assert screen.getvalue() == "AutoSync: a line\n"


def test_other_handlers_keep_their_streams() -> None:
    own = io.StringIO()
    with terminal() as screen:
        rank_zero.log.addHandler(logging.StreamHandler(own))
        with Progress(console=Console(file=screen, force_terminal=True), auto_refresh=False):
            rank_zero_info("AutoSync: a line")
    assert own.getvalue() == "AutoSync: a line\n"
