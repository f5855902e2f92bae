"""Optuna's journal file, without waiting for the disk at every line."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

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
