"""Work shared out over the cores of this machine."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from lightning_autosync.measure.conditions import usable_cores

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
            with _without_interrupts():
                answers = pool.map(_answer, work)
            yield from answers
        except BaseException:
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()  # an interrupted command does not finish the pieces that were begun
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes started in the block never hear of a Ctrl-C, which is for the one that started them; it does after."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_there: Callable[[Any], Any]


def _prepare(make: Callable[..., Callable[[Any], Any]], arguments: tuple[Any, ...]) -> None:
    global _there
    _there = make(*arguments)


def _answer(piece: Any) -> Any:
    return _there(piece)
