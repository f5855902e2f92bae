"""Signals that end this process, as exceptions, so that whoever waits for other processes can end these first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ORDINARY = (signal.SIG_DFL, signal.default_int_handler)


class DeferredSignals:
    """The signals that came in a block of `signals_as_exceptions`."""

    def __init__(self) -> None:
        self._holding = False
        self._held: int | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within the block nothing is raised, but at its end: for what must not be done by halves."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
            if self._held is not None:
                raise _exception(self._held)

    def receive(self, number: int, frame: FrameType | None) -> None:
        if not self._holding:
            raise _exception(number)
        self._held = self._held or number


@contextmanager
def signals_as_exceptions() -> Iterator[DeferredSignals]:
    """Within the block SIGTERM and SIGHUP raise `SystemExit`, with a shell's status, and SIGINT `KeyboardInterrupt`.

    Only where they would end this process otherwise: signals that are ignored stay so, and handlers that somebody set
    stay theirs. In threads but the main one, which alone gets signals, nothing changes.
    """
    endings, before = DeferredSignals(), {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in _ENDING}
    ours = {number: handler for number, handler in before.items() if handler in _ORDINARY}
    try:
        for number in ours:
            signal.signal(number, endings.receive)
        yield endings
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)


def _exception(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
