"""Optuna's journal file, but without a disk sync for every line and without stale locks of dead processes."""

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

LOCK_TIMEOUT = 60.0
"""Maximum seconds to wait for another process that holds the lock, which it needs for a few milliseconds."""


class _Line(Record):
    """The fields of a line that Optuna does not check. A wrong value would fail only later, when it is used.

    Values may be infinite, and intermediate values NaN: Optuna writes both.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=True)

    study_name: str = ""
    user_attr: dict[str, Any] = Field(default_factory=dict)
    user_attrs: dict[str, Any] = Field(default_factory=dict)
    system_attr: dict[str, Any] = Field(default_factory=dict)
    system_attrs: dict[str, Any] = Field(default_factory=dict)
    value: float | None = None
    values: tuple[float, ...] | None = None
    intermediate_value: float = 0.0
    intermediate_values: dict[str, float] = Field(default_factory=dict)


class Journal(JournalFileBackend):
    """A journal that survives the end of any process, but not a crash of the machine.

    A trial of a plan space writes some seventy lines, one for each parameter. Optuna syncs each line to the disk, which
    can take longer than a trial. Here the operating system decides when to write. File format and lock are Optuna's,
    but the lock ends with the process that holds it.

    Args:
        path: path of the file, which is created if it does not exist.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = JournalLock(path)
        super().__init__(path, self._lock)

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        """The lines from a number on.

        Raises:
            DocumentError: a line is not a valid line of a journal.
        """
        number = log_number_from
        try:
            for number, log in enumerate(super().read_logs(log_number_from), log_number_from + 1):
                checked(_Line, log, f"{self._path}:{number}")
                yield log
        except DocumentError:
            raise
        except ValueError as error:
            raise DocumentError(f"{self._path}:{number + 1}: not a journal line: {error}") from None

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append lines after the last whole line. A partial line of a killed process is dropped."""
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        self._lock.acquire()
        try:
            append_lines(self._path, lines)
        finally:
            self._lock.release()


class JournalLock(JournalFileSymlinkLock):
    """Optuna's lock, a symbolic link that other Optuna programs respect, and a kernel lock between our processes.

    Optuna removes a stale link only after 30 s, because it cannot know whether the link's creator is alive. Our link
    has a second name (a hard link). It exists only while its creator holds the kernel lock, which ends with the
    process. So a process that gets the kernel lock and finds a second name knows that the creator is dead.

    Args:
        path: path of the journal.
    """

    def __init__(self, path: str) -> None:
        super().__init__(os.path.abspath(path))  # a link finds a relative path from its own folder only
        self._second_name = f"{self._lock_file}.autosync"
        self._file: IO[bytes] | None = None

    def acquire(self) -> bool:
        """Wait for the lock.

        Raises:
            TimeoutError: another process held it for `LOCK_TIMEOUT` seconds.
        """
        file = open(self._lock_target_file, "ab")  # noqa: SIM115 - open for as long as the lock is held
        try:
            if self._lock_in_kernel(file):
                self._replace_link()
            else:
                self._wait_for_link()
        except BaseException:
            file.close()
            raise
        self._file = file
        return True

    def release(self) -> None:
        """Release the lock.

        Raises:
            RuntimeError: another process holds it.
        """
        try:
            if self._file is None or not os.path.lexists(self._second_name):
                super().release()
            else:
                self._remove_link()
        finally:
            file, self._file = self._file, None
            if file is not None:
                file.close()

    def _lock_in_kernel(self, file: IO[bytes]) -> bool:
        """Take the kernel lock; False if the file system does not support it, so that only Optuna's lock is left.

        Raises:
            TimeoutError: another process held the lock for too long; it may be stopped.
        """
        deadline, pause = time.monotonic() + LOCK_TIMEOUT, 0.001
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{self._lock_target_file}: another process has locked it for {LOCK_TIMEOUT:g} s; "
                        "resume or end that process"
                    ) from None
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
            except OSError:
                return False
            else:
                return True

    def _replace_link(self) -> None:
        """Create the link after removing that of a dead process. The caller must hold the kernel lock."""
        try:
            self._remove_link()
            try:
                os.symlink(self._lock_target_file, self._second_name)
                os.link(self._second_name, self._lock_file, follow_symlinks=False)
            except OSError:  # another Optuna program holds the lock, or the file system has no links to links
                with suppress(FileNotFoundError):
                    os.unlink(self._second_name)
                self._wait_for_link()
        except BaseException:
            self._remove_link()
            raise

    def _wait_for_link(self) -> None:
        """Create the link as Optuna does, after waiting for another program to remove its own.

        Optuna removes a stale link only if that leads to the journal, which links for relative paths seldom do. It asks
        for other links for ever, without a pause. Here each link that stays for the grace period is stale.
        """
        assert self.grace_period is not None
        pause, seen, since = 0.001, 0, 0.0
        while True:
            with suppress(FileExistsError):
                os.symlink(self._lock_target_file, self._lock_file)
                return
            with suppress(FileNotFoundError):  # it was removed just now
                made = os.lstat(self._lock_file).st_mtime_ns
                if made != seen:
                    seen, since = made, time.monotonic()
                elif time.monotonic() - since > self.grace_period:
                    os.unlink(self._lock_file)
                    continue
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _remove_link(self) -> None:
        """Remove our link, or that of a dead process of ours, and its second name; other programs' links stay."""
        with suppress(FileNotFoundError):
            ours = os.lstat(self._second_name)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.lstat(self._lock_file), ours):
                    os.unlink(self._lock_file)
            os.unlink(self._second_name)
