"""A torchrun job: its process, which does not outlive the sweep, and what each of its ranks reports."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from lightning_autosync.documents import write_text
from lightning_autosync.interrupts import signals_as_exceptions

_log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_LIBRARY = ctypes.CDLL(None) if sys.platform == "linux" else None
"""Loaded in advance, because little may be done between fork and exec."""
GRACE = 45.0
"""Seconds for torchrun to end its processes, to which it gives 30, before all are killed."""


def run(command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> int:
    """Run a command to its end and return its status. Any exception meanwhile ends it and all that it started.

    On Linux the command gets SIGTERM, too, when this process is killed.

    Raises:
        KeyboardInterrupt, SystemExit: SIGINT, or SIGTERM or SIGHUP, came meanwhile.
    """
    process: subprocess.Popen[bytes] | None = None
    with signals_as_exceptions() as signals:
        try:
            with signals.deferred():  # else a process could exist that nobody knows of
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
                with signals.deferred():
                    kill(process)
            raise


def _end_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM to this process when the thread that started it ends, even by SIGKILL."""
    if _LIBRARY is not None:
        _LIBRARY.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before the call
            os._exit(1)


def ask_to_end(process: subprocess.Popen[bytes], grace: float) -> None:
    """Let a process end by itself, for at most ``grace`` seconds."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(grace)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its process group, and, if it is still alive, all its descendants."""
    # torchrun's ranks are in sessions of their own; if torchrun has ended, they are gone.
    started = _descendants(process.pid) if process.poll() is None else []
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for number in started:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    process.wait()


def _descendants(pid: int) -> list[int]:
    """Children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name is in parentheses and may hold anything. State and parent follow it.
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found[1:]


class RankReport(Callback):
    """A callback of Hydra that writes ``rank_N.json``: how the rank's job ended, and what it returned.

    Args:
        directory: of the files.
    """

    def __init__(self, directory: str) -> None:
        self._path = Path(directory) / f"rank_{os.environ['RANK']}.json"

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        found = job_return._return_value  # `return_value` would raise the job's exception
        failed = job_return.status is not JobStatus.COMPLETED
        report = {
            "status": job_return.status.name,
            "error": f"{type(found).__name__}: {found}" if failed else None,
            "return_value": None if failed else _plain(found),
        }
        write_text(self._path, json.dumps(report) + "\n")


def _plain(value: Any) -> Any:
    """A job's return value as JSON can hold it: numbers, text, and lists and mappings of them; None for the rest."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    with suppress(ValueError):  # a run that found nothing has no number
        return float(value) if hasattr(value, "__float__") else None
    return None
