"""Optuna's journal file, without waiting for the disk at every line."""

from __future__ import annotations

import json
import os
from typing import IO, Any

from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

_BLOCK = 1 << 16
"""Bytes that are looked through at once for the end of a line."""


class Journal(JournalFileBackend):
    """A journal that survives the end of any process, but not of the machine.

    A trial of a plan space writes some seventy lines, one for each parameter. Optuna waits until each is on the disk,
    which takes longer than many a trial; here the operating system writes them when it sees fit. The file's form, and
    how processes take turns, are Optuna's.

    Args:
        path: of the file; made where there is none.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._turn = JournalFileSymlinkLock(path)
        super().__init__(path, self._turn)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write lines at the end of the file, after what a process that was killed in the midst of one left whole."""
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        self._turn.acquire()
        try:
            with open(self._path, "r+b") as file:
                file.seek(_end_of_lines(file))
                file.truncate()
                file.write(lines.encode())
        finally:
            self._turn.release()


def _end_of_lines(file: IO[bytes]) -> int:
    """Where the last whole line ends."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
