"""A Ctrl-C ends a command at any moment with exit status `STATUS`: it is never lost, and prints no traceback."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

STATUS = 128 + signal.SIGINT
"""Exit status after a Ctrl-C, as shells have it."""
_SOON = 0.05
"""Seconds after which an interruption that was swallowed is raised again."""
_folders: list[str] = []


def end_at_once() -> None:
    """From now on a Ctrl-C ends this process at once. For the times before work begins and after it ends.

    Imports, and an interpreter that ends, may swallow an exception. Where a Ctrl-C is ignored, as in the background of
    a shell, or has another handler, nothing changes.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) in (
        signal.default_int_handler,
        signal.SIG_DFL,
    ):
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """From now on a Ctrl-C raises `KeyboardInterrupt` as usual, and again where that is swallowed.

    Exceptions within destructors and callbacks of the garbage collector are swallowed.
    """
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = _hear


def remove_at_end(folder: str) -> None:
    """Have a folder removed if a Ctrl-C ends this process at once."""
    _folders.append(folder)


def _end(number: int, frame: FrameType | None) -> None:
    for folder in _folders:
        shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # nobody reads it
        os.write(2, f"{os.path.basename(sys.argv[0])}: interrupted\n".encode())
    os._exit(STATUS)


def _hear(unraisable: Any) -> None:
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        again = threading.Timer(_SOON, signal.raise_signal, (signal.SIGINT,))
        again.daemon = True
        again.start()
    else:
        sys.__unraisablehook__(unraisable)
