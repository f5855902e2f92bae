"""Optuna's journal file, without waiting for the disk at every line, nor for a process that is dead."""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import suppress
from typing import IO, Any

from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

from lightning_autosync.documents import append_lines


class Journal(JournalFileBackend):
    """A journal that survives the end of any process, but not of the machine.

    A trial of a plan space writes some seventy lines, one for each parameter. Optuna waits until each is on the disk,
    which takes longer than many a trial; here the operating system writes them when it sees fit. The file's form, and
    how processes take turns, are Optuna's, but a turn ends with the process that has it.

    Args:
        path: of the file; made where there is none.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._turn = Turn(path)
        super().__init__(path, self._turn)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write lines at the end of the file, after what a process that was killed in the midst of one left whole."""
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        self._turn.acquire()
        try:
            append_lines(self._path, lines)
        finally:
            self._turn.release()


class Turn(JournalFileSymlinkLock):
    """Optuna's lock, a symbolic link, for processes of Optuna alone; among ours a lock that the kernel keeps besides.

    Optuna takes a link away only after it was there for 30 s: it cannot know whether the process that made it lives.
    Ours has a second name. Whoever has the kernel's lock and finds that name knows that its maker is dead.

    Args:
        path: of the journal.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._ours = f"{self._lock_file}.autosync"
        self._file: IO[bytes] | None = None

    def acquire(self) -> bool:
        """Wait for the turn."""
        file = open(self._lock_target_file, "ab")  # noqa: SIM115 - open for as long as the turn lasts
        try:
            with suppress(OSError):  # a file system without such locks; Optuna's own is left then
                fcntl.flock(file, fcntl.LOCK_EX)
            self._remove(self._lock_file)
            self._link()
        except BaseException:
            self._remove(self._lock_file)
            file.close()
            raise
        self._file = file
        return True

    def release(self) -> None:
        """End the turn.

        Raises:
            RuntimeError: it was another's.
        """
        try:
            if self._file is None or not os.path.lexists(self._ours):
                super().release()
            else:
                self._remove(self._lock_file)
        finally:
            file, self._file = self._file, None
            if file is not None:
                file.close()

    def _link(self) -> None:
        try:
            os.symlink(self._lock_target_file, self._ours)
            os.link(self._ours, self._lock_file, follow_symlinks=False)
        except OSError:  # another's, of Optuna, or a file system without such links
            with suppress(FileNotFoundError):
                os.unlink(self._ours)
            super().acquire()

    def _remove(self, lock: str) -> None:
        """Remove our link, be it a dead process's, and its second name; another's stays."""
        with suppress(FileNotFoundError):
            ours = os.lstat(self._ours)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.lstat(lock), ours):
                    os.unlink(lock)
            os.unlink(self._ours)
