"""Whose a trial is: the process that measures it, and whether that is still there."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path


def this_process() -> str:
    """A name by which a process on this machine can tell whether this one lives."""
    return f"{os.getpid()}.{_begin(os.getpid())}@{_place()}"


def is_gone(process: str) -> bool:
    """Whether the process of that name has ended; False where nothing can be known: of one on another machine, or on
    this one before it was started again."""
    number, _, place = process.partition("@")
    pid, _, begin = number.partition(".")
    if place != _place() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:  # it is there, and another user's
        return False
    return begin not in ("", _begin(int(pid)))  # numbers are given again


def _begin(pid: int) -> str:
    """When a process began, by the kernel's clock, where there is ``/proc``."""
    with suppress(OSError):
        # Behind the name, which is in parentheses and may hold anything, it is the twentieth field.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def _place() -> str:
    """Where process numbers mean the same: the machine since it was started, and the namespace of its container.

    Machines may have equal names, and all begin with the same namespace; what Linux drew when it started differs.
    """
    start = space = ""
    with suppress(OSError):
        start = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()}/{start}/{space}"
