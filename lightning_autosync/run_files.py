"""Files of runs, from which an interrupted command resumes."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from lightning_autosync.documents import append_lines, check_format, checked, held, parse_json, shown, whole_lines
from lightning_autosync.errors import DocumentError


class Keyed(Protocol):
    """A dataclass of plain data with a key that identifies the run."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def key(self) -> Hashable: ...


Run = TypeVar("Run", bound=Keyed)

_Fields = dict[str, Any]
REMEDY = "use the settings that the file has, or give another file as {}=FILE"


class RunFile(Generic[Run]):
    """A file with a line for the settings that all runs share, then one line per run. A truncated last line is ignored.

    Args:
        path: path of the file, which is created when the first run is added.
        form: format of the file, for example ``autosync-rehearsal-runs/3``.
        what: source of the runs in messages, for example ``a rehearsal``.
        settings: plain data on which runs depend, besides their keys.
        kind: class of the runs.
        key: key of the command that names the file.

    Attributes:
        runs: runs by key; the last run with a key counts.

    Raises:
        DocumentError: the runs were made with other settings (the message names the field), or the file has another
            format.
    """

    def __init__(
        self,
        path: Path,
        form: str,
        what: str,
        settings: Mapping[str, Any],
        kind: type[Run],
        key: str = "runs",
    ) -> None:
        self._path = path
        self._key = key
        self._form, self._settings = form, settings
        self._has_header = False
        self.runs: dict[Hashable, Run] = {}
        for where, line in whole_lines(path):
            data = checked(_Fields, parse_json(line, f"{where}: not a line of {what}'s runs"), where)
            if self._has_header:
                run = checked(kind, data, f"{where}: not a run of {what}")
                self.runs[run.key] = run
            else:
                self._check(data)
                self._has_header = True

    def append(self, run: Run) -> None:
        """Append a run to the file."""
        header = [] if self._has_header else [{"format": self._form, "settings": self._settings}]
        append_lines(self._path, "".join(json.dumps(line) + "\n" for line in (*header, asdict(run))))
        self._has_header = True

    def _check(self, header: Mapping[str, Any]) -> None:
        check_format(header.get("format"), self._form, f"{self._path}:1", DocumentError)
        theirs = header.get("settings")
        if not isinstance(theirs, dict):
            raise DocumentError(f"{self._path}:1: settings: expected a mapping of fields, got {type(theirs).__name__}")
        for name, value in self._settings.items():
            if (found := theirs.get(name)) != value:
                raise DocumentError(
                    f"{self._path}: {name}: its runs were made with {shown(found)}, not {value!r}; "
                    f"{REMEDY.format(self._key)}"
                )


def alone(path: Path) -> AbstractContextManager[None]:
    """Prevent other processes from adding runs to the file within the block.

    Raises:
        DocumentError: another process is adding runs, or the lock file cannot be made.
    """
    refusal = DocumentError(f"{path}: another process is adding runs to it; let it end, or give another file")
    return held(path.with_name(f".{path.name}.lock"), refusal)
