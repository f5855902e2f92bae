"""A Ctrl-C ends a command at any moment, with exit status `STATUS`: none is lost, and none prints a traceback."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from types import FrameType
from typing import Any

STATUS = 128 + signal.SIGINT
"""Exit status after a Ctrl-C, as shells have it."""
_SOON = 0.05
"""Seconds after which an interruption that was swallowed comes again."""
_folders: list[str] = []


def end_at_once() -> None:
    """From now on a Ctrl-C ends this process then and there: before anything is begun, and after everything is done.

    Libraries that are being imported, and an interpreter that is about to end, may swallow an exception. Where a Ctrl-C
    is ignored, as in the background of a shell, or is somebody else's, it stays so.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) in (
        signal.default_int_handler,
        signal.SIG_DFL,
    ):
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """From now on a Ctrl-C raises `KeyboardInterrupt` as usual; again where that is swallowed.

    What is raised within a destructor, or by a callback of the garbage collector, reaches nobody.
    """
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = _hear


def remove_at_end(folder: str) -> None:
    """Have a folder removed if a Ctrl-C ends this process then and there."""
    _folders.append(folder)


def _end(number: int, frame: FrameType | None) -> None:
    for folder in _folders:
        shutil.rmtree(folder, ignore_errors=True)
    os.write(2, f"{os.path.basename(sys.argv[0])}: interrupted\n".encode())
    os._exit(STATUS)


def _hear(unraisable: Any) -> None:
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        again = threading.Timer(_SOON, signal.raise_signal, (signal.SIGINT,))
        again.daemon = True
        again.start()
    else:
        sys.__unraisablehook__(unraisable)
