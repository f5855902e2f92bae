"""Optuna's journal file, without waiting for the disk at every line."""

from __future__ import annotations

import json
from typing import Any

from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

from lightning_autosync.documents import append_lines


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
            append_lines(self._path, lines)
        finally:
            self._turn.release()
