"""Work shared out over the cores of this machine."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

from lightning_autosync.workers.cores import usable_cores

Piece = TypeVar("Piece")
Made = TypeVar("Made")


def spread(
    make: Callable[..., Callable[[Piece], Made]],
    arguments: tuple[Any, ...],
    work: Sequence[Piece],
    processes: int | None = None,
) -> Iterator[Made]:
    """What ``make(*arguments)`` answers to every piece of work, in their order.

    Args:
        make: makes the one who does the work, once in each process.
        arguments: for it; what all pieces need, sent to each process once.
        work: the pieces.
        processes: that share them; None takes one a core. A single one is this process itself.
    """
    count = min(processes or usable_cores(), len(work))
    if count <= 1:
        yield from map(make(*arguments), work)
        return
    # A fork would copy torch's threads half-way through whatever they do.
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(count, context, _prepare, (make, arguments)) as pool:
        try:
            yield from pool.map(_answer, work)
        except BaseException:
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()  # an interrupted command does not finish the pieces that were begun
            pool.shutdown(cancel_futures=True)
            raise


_there: Callable[[Any], Any]


def _prepare(make: Callable[..., Callable[[Any], Any]], arguments: tuple[Any, ...]) -> None:
    global _there
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C at the terminal is for the process that started this one
    _there = make(*arguments)


def _answer(piece: Any) -> Any:
    return _there(piece)
