"""Whose a trial is: the process that measures it, and whether that is still there."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def this_process() -> str:
    """A name by which a process on this machine can tell whether this one lives."""
    return f"{os.getpid()}@{_place()}"


def is_gone(process: str) -> bool:
    """Whether the process of that name has ended; False of one that is elsewhere, of which nothing can be known."""
    number, _, place = process.partition("@")
    if place != _place() or not number.isdigit():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except OSError:  # it is there, and another user's
        return False
    return False


def _place() -> str:
    """Where process numbers mean the same: the machine, and on Linux the namespace of its container."""
    space = ""
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()}/{space}"
