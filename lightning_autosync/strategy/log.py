"""Lines in the log of a job, which leave a progress bar whole."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from lightning_utilities.core import rank_zero
from tqdm import tqdm


def rank_zero_info(message: str) -> None:
    """Log a line on rank 0, above Lightning's progress bar while one is shown."""
    with ExitStack() as stack:
        # Lightning's handlers keep the stderr that was there when it was imported. While Rich shows a bar, it puts
        # another one in its place, which prints lines above the bar.
        for handler in _handlers():
            if handler.stream is sys.__stderr__ and (before := handler.setStream(sys.stderr)) is not None:
                stack.callback(handler.setStream, before)
        if getattr(tqdm, "_instances", None):
            stack.enter_context(tqdm.external_write_mode(file=sys.stderr))  # clears bars while the line is written
        rank_zero.rank_zero_info(message)


def _handlers() -> Iterator[logging.StreamHandler[Any]]:
    """The handlers of Lightning's logger that write to a stream, not to a file."""
    logger: logging.Logger | None = rank_zero.log
    while logger is not None:
        yield from (handler for handler in logger.handlers if type(handler) is logging.StreamHandler)
        logger = logger.parent if logger.propagate else None
