"""Signals: a Ctrl-C is never lost and prints no traceback, and commands end their work in order."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

STATUS = 128 + signal.SIGINT
"""Exit status after a Ctrl-C, as in shells."""
_REPEAT = 0.05
"""Seconds after which a swallowed Ctrl-C is raised again."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ENDINGS = (signal.SIGTERM, signal.SIGHUP)
_folders: list[Path] = []
_received = False


def _raise(number: int, frame: FrameType | None) -> None:
    global _received
    _received = True
    raise KeyboardInterrupt


def _remove_and_end(number: int, frame: FrameType | None) -> None:
    if signal.getsignal(number) is not _remove_and_end:
        return  # Lightning's handler calls this one, and ends the process in order itself
    _remove_folders()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


_DEFAULT_HANDLERS = (signal.SIG_DFL, signal.default_int_handler, _raise, _remove_and_end)


def received() -> bool:
    """Whether a Ctrl-C was received after `raise_again` or within `signals_as_exceptions`.

    Libraries may turn its exception into one of their own, or swallow it and fail later.
    """
    return _received


def end_at_once() -> None:
    """From now on a Ctrl-C ends this process at once. Use this before work begins and after it has ended.

    Then an exception could be lost: imports and the end of the interpreter may swallow it. If Ctrl-C is ignored, as in
    the background of a shell, or has another handler, nothing changes.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) in _DEFAULT_HANDLERS:
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """From now on a Ctrl-C raises `KeyboardInterrupt` as usual, and raises it again if it is swallowed.

    Python swallows exceptions in destructors and in callbacks of the garbage collector.
    """
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, _raise)
        sys.unraisablehook = _raise_later


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A new folder for the block, which is removed also if a Ctrl-C, SIGTERM or SIGHUP ends this process at once.

    Signals that are ignored or have another handler are left alone. While the folder exists, SIGTERM and SIGHUP are
    handled between two steps of the interpreter, so later if C code runs.
    """
    folder = Path(tempfile.gettempdir(), f"autosync-{os.getpid()}-{secrets.token_hex(8)}")
    ours = []
    _folders.append(folder)  # before it exists, since a signal may come at any moment
    try:
        if threading.current_thread() is threading.main_thread():
            ours = [number for number in _ENDINGS if signal.getsignal(number) is signal.SIG_DFL]
        for number in ours:
            signal.signal(number, _remove_and_end)
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _restore(ours)
        _folders.remove(folder)


def _restore(numbers: Iterable[int]) -> None:
    """Give signals their default again, unless something else handles them by now."""
    for number in numbers:
        if signal.getsignal(number) is _remove_and_end:
            signal.signal(number, signal.SIG_DFL)


# A fork has no folder to remove. So a signal ends it at once, also while it waits in C code.
os.register_at_fork(after_in_child=lambda: _restore(_ENDINGS))


def _remove_folders() -> None:
    for folder in _folders:
        if folder.name.startswith(f"autosync-{os.getpid()}-"):  # a forked copy of a process must not remove its folders
            shutil.rmtree(folder, ignore_errors=True)


def _end(number: int, frame: FrameType | None) -> None:
    _remove_folders()  # here, since os._exit below skips all exit handlers
    with suppress(OSError):  # standard error may be closed
        os.write(2, f"{os.path.basename(sys.argv[0])}: interrupted\n".encode())
    os._exit(STATUS)


def _raise_later(unraisable: Any) -> None:
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        # The main thread handles the signal, by then outside of the destructor or callback that swallowed it.
        again = threading.Timer(_REPEAT, signal.raise_signal, (signal.SIGINT,))
        again.daemon = True
        again.start()
    else:
        sys.__unraisablehook__(unraisable)


class SignalExceptions:
    """The signals received in a block of `signals_as_exceptions`."""

    def __init__(self) -> None:
        self._deferring = False
        self._deferred: int | None = None

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer signals: the first one raises at the end of the block. Use this for work that must be completed."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
            if self._deferred is not None:
                raise _exception(self._deferred)

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        global _received
        _received = _received or number == signal.SIGINT
        if not self._deferring:
            raise _exception(number)
        self._deferred = self._deferred or number


@contextmanager
def signals_as_exceptions() -> Iterator[SignalExceptions]:
    """Within the block SIGTERM and SIGHUP raise `SystemExit` with a shell's status, and SIGINT `KeyboardInterrupt`.

    So code that waits for other processes can end these first. Signals that are ignored or have another handler are
    left alone. In other threads than the main one nothing changes, because only the main thread handles signals.
    """
    found, before = SignalExceptions(), {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in _SIGNALS}
    ours = {number: handler for number, handler in before.items() if handler in _DEFAULT_HANDLERS}
    try:
        for number in ours:
            signal.signal(number, found.receive)
        yield found
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer a Ctrl-C to the end of the block. Blocks may be nested.

    This is for code that reads or writes a study. If it were interrupted, a lock could stay held or a cache incomplete,
    and the storage could not be used to end the run in order.
    """
    with signals_as_exceptions() as found, found.deferred():
        yield


def _exception(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
