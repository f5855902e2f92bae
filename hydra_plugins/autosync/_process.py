"""A job's process, which does not outlive the sweep that waits for it."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

from lightning_autosync.measure.workers.endings import raised_endings

_log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_LIBRARY = ctypes.CDLL(None) if sys.platform == "linux" else None
"""Loaded here: between fork and exec as little as possible may be done."""
GRACE = 45.0
"""Seconds for torchrun to end its processes before all are killed; it gives them 30."""


def run(command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> int:
    """Run a command to its end and return its status; whatever interrupts that ends it and what it started.

    On Linux it is asked to end, too, when this process is killed.

    Raises:
        KeyboardInterrupt, SystemExit: SIGINT, or SIGTERM or SIGHUP, came meanwhile.
    """
    process: subprocess.Popen[bytes] | None = None
    with raised_endings() as endings:
        try:
            with endings.held():  # or a process may be there that nobody knows
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment,
                    start_new_session=True, preexec_fn=partial(_end_with_parent, os.getpid()),
                )  # fmt: skip
            return process.wait()
        except BaseException:
            if process is None:
                raise
            _log.warning("Ending the job's processes, which may take %.0f s; a second signal kills them", GRACE)
            try:
                ask_to_end(process, GRACE)
            finally:
                with endings.held():
                    kill(process)
            raise


def _end_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM to this process when the thread that started it ends, by SIGKILL too."""
    if _LIBRARY is not None:
        _LIBRARY.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it has ended just before
            os._exit(1)


def ask_to_end(process: subprocess.Popen[bytes], grace: float) -> None:
    """Let a process end by itself, for at most ``grace`` seconds."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(grace)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, its group, which is its own, and, if it is still there, all that it started."""
    # torchrun's ranks have sessions of their own, and are gone if it has ended.
    started = _descendants(process.pid) if process.poll() is None else []
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for number in started:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    process.wait()


def _descendants(pid: int) -> list[int]:
    """The processes that a process started, those that these started, and so on."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # Behind the name, which is in parentheses and may hold anything, come the state and the parent.
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found[1:]
