"""Optuna's journal file, without waiting for the disk at every line, nor for a process that is dead."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Generator
from contextlib import suppress
from typing import IO, Any

from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from pydantic import ConfigDict, Field

from lightning_autosync.documents import Record, append_lines, checked
from lightning_autosync.errors import DocumentError


class _Line(Record):
    """What of a line Optuna takes as it is, so that it would show only where somebody asks for it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    study_name: str = ""
    user_attr: dict[str, Any] = Field(default_factory=dict)
    user_attrs: dict[str, Any] = Field(default_factory=dict)
    system_attr: dict[str, Any] = Field(default_factory=dict)
    system_attrs: dict[str, Any] = Field(default_factory=dict)
    value: float | None = None
    values: tuple[float, ...] | None = None
    intermediate_value: float = 0.0
    intermediate_values: dict[str, float] = Field(default_factory=dict)


PATIENCE = 60.0
"""Seconds for which a process may keep its turn, which it needs for a few milliseconds."""


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

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        """The lines from one on.

        Raises:
            DocumentError: a line is not one of a journal.
        """
        number = log_number_from
        try:
            for number, log in enumerate(super().read_logs(log_number_from), log_number_from + 1):
                checked(_Line, log, f"{self._path}:{number}")
                yield log
        except DocumentError:
            raise
        except ValueError as error:
            raise DocumentError(f"{self._path}:{number + 1}: not a line of a journal: {error}") from None

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
        """Wait for the turn.

        Raises:
            TimeoutError: it did not come in `PATIENCE` seconds.
        """
        file = open(self._lock_target_file, "ab")  # noqa: SIM115 - open for as long as the turn lasts
        try:
            self._wait(file)
        except BaseException:
            file.close()
            raise
        try:
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

    def _wait(self, file: IO[bytes]) -> None:
        """Have the kernel's lock.

        Raises:
            TimeoutError: another process had it for too long; it may be stopped.
        """
        deadline, pause = time.monotonic() + PATIENCE, 0.001
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{self._lock_target_file}: another process has been writing to it for {PATIENCE:g} s; is it "
                        "stopped?"
                    ) from None
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
            except OSError:  # a file system without such locks; Optuna's own is left then
                return
            else:
                return

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
