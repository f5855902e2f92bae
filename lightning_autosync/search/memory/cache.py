"""`TuningCache`: a directory of tuned plans, one file each, which jobs share."""

from __future__ import annotations

import json
import os
import re
import stat
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import MOST_BYTES, parse_json, write_text, writing
from lightning_autosync.errors import DocumentError
from lightning_autosync.search.memory.entry import TunedPlan, TuningKey
from lightning_autosync.search.memory.nearness import nearest

VARIABLE = "LIGHTNING_AUTOSYNC_CACHE"
"""Environment variable with the directory; empty for none."""
MOST_ENTRIES = 1000
"""Largest number of entries in a directory; those that were not used for longest are removed."""
MOST_CACHED_BYTES = 50 * 2**20
"""Largest size of all entries together."""
MOST_COMPARED = 100
"""Number of entries, those used last, among which `TuningCache.nearest` looks: a job waits for it."""
_ABANDONED = 3600.0
"""Age in seconds from which a file that was written aside, but not renamed, belongs to a dead process."""

_SUFFIX = ".tuned.json"
_ENTRY = re.compile(r"[0-9a-f]{12}\.tuned\.json")
_ASIDE = re.compile(r"\.[0-9a-f]{12}\.tuned\.json\.[0-9a-f]{16}")


@dataclass(frozen=True)
class Remembered:
    """A file of the cache.

    Attributes:
        path: its path.
        used: time at which a job last wrote or used it, in seconds since the epoch.
        entry: its content; None if it cannot be read.
        fault: reason why it cannot be read, with its path; empty if it can.
    """

    path: Path
    used: float
    entry: TunedPlan | None
    fault: str

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the key."""
        return self.path.name.removesuffix(_SUFFIX)


@dataclass(frozen=True)
class _File:
    path: Path
    used: float
    size: int


class TuningCache:
    """Tuned plans by their keys, in a directory that several jobs may use at once.

    `find`, `nearest`, `store` and `remove` serve jobs and raise no errors: a damaged or missing cache costs a job its
    memory, and nothing else. What goes wrong is one warning. They do not use a directory that belongs to another user,
    or that all users may write to: anybody could then choose the plans of this user's jobs.

    Args:
        directory: the directory; None takes `default_directory`.

    Attributes:
        directory: the directory; None if there is none, because the user has no home directory.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self.directory = default_directory() if directory is None else Path(directory)
        self._warned: set[str] = set()

    def find(self, key: TuningKey) -> TunedPlan | None:
        """The entry of a key; None if there is none that can be read. It counts as used."""
        if self.directory is None or self._is_refused():
            return None
        path = self._path(self.directory, key)
        if not os.path.isfile(path):
            return None
        try:
            entry = _read(path)
        except DocumentError as error:
            self._warn(str(path), f"a saved plan is ignored: {error}")
            return None
        with suppress(OSError):
            os.utime(path)
        return entry

    def nearest(self, key: TuningKey, cluster: ClusterSpec) -> list[TunedPlan]:
        """Entries whose plans suit a job, nearest first; see :func:`lightning_autosync.search.memory.nearness.nearest`.

        Only the `MOST_COMPARED` entries that were used last are looked at. Files that cannot be read are left out.
        """
        if self._is_refused():
            return []
        try:
            remembered = [_remembered(file) for file in self._files()[:MOST_COMPARED]]
        except DocumentError:
            return []
        return nearest(key, cluster, [one.entry for one in remembered if one.entry is not None])

    def store(self, entry: TunedPlan) -> None:
        """Write an entry in place of an earlier one with its key, and remove the oldest beyond the limits."""
        if self.directory is None and VARIABLE in os.environ:
            return  # the user turned the memory off
        if self._is_refused():
            return
        try:
            self._write(entry)
        except DocumentError as error:
            self._warn("store", f"the plan that this job found is not saved for later jobs: {error}")

    def remove(self, key: TuningKey) -> None:
        """Remove the entry of a key, if there is one."""
        if self.directory is None or self._is_refused():
            return
        path = self._path(self.directory, key)
        try:
            path.unlink(missing_ok=True)
        except OSError as cause:
            self._warn(str(path), f"{path}: cannot be removed: {cause.strerror}")

    def entries(self) -> list[Remembered]:
        """All files, those used last first.

        Raises:
            DocumentError: the directory cannot be read.
        """
        return [_remembered(file) for file in self._files()]

    def clear(self, older_than: float | None = None, fingerprint: str | None = None) -> int:
        """Remove entries, and nothing else that is in the directory; returns their number.

        Args:
            older_than: removes only entries that no job wrote or used for so many seconds.
            fingerprint: removes only the entry of the key with this fingerprint.

        Raises:
            DocumentError: the directory cannot be read, or a file cannot be removed.
        """
        latest = time.time() - (older_than or 0.0)
        files = [
            file
            for file in self._files()
            if (older_than is None or file.used <= latest)
            and (fingerprint is None or file.path.name == fingerprint + _SUFFIX)
        ]
        for file in files:
            with writing(file.path):
                file.path.unlink(missing_ok=True)
        self._remove_abandoned()
        return len(files)

    def _is_refused(self) -> bool:
        """Whether another user could write to the directory; warns if so."""
        if self.directory is None or not hasattr(os, "geteuid"):
            return False
        try:
            status = os.stat(self.directory)
        except OSError:
            return False  # it is not there yet, or reading or writing it will tell
        fault = ""
        if status.st_uid != os.geteuid():
            fault = f"it belongs to user {status.st_uid}, but this job runs as user {os.geteuid()}"
        elif status.st_mode & stat.S_IWOTH:
            fault = f"all users may write to it (mode {stat.S_IMODE(status.st_mode):04o})"
        if fault:
            self._warn(
                "owner",
                f"{self.directory}: {fault}; plans are neither read from it nor saved in it. Set {VARIABLE} to a "
                "directory of your own that other users may not write to",
            )
        return bool(fault)

    def _path(self, directory: Path, key: TuningKey) -> Path:
        return directory / f"{key.fingerprint}{_SUFFIX}"

    def _write(self, entry: TunedPlan) -> None:
        if self.directory is None:
            raise DocumentError(f"there is no home directory; set {VARIABLE} to a directory")
        path = self._path(self.directory, entry.key)
        text = json.dumps(entry.to_dict()) + "\n"
        if len(text) > MOST_BYTES:
            raise DocumentError(f"{path}: the entry has more than {MOST_BYTES} bytes, the maximum")
        parse_json(text, str(path))  # a file that no job could read must not be written
        with writing(self.directory):
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_text(path, text)
        self._trim(path)

    def _trim(self, newest: Path) -> None:
        """Remove the files beyond the limits, except ``newest``."""
        size = 0
        for number, file in enumerate(self._files()):
            size += file.size
            if (number >= MOST_ENTRIES or size > MOST_CACHED_BYTES) and file.path != newest:
                with suppress(OSError):  # a job beside this one may have removed it
                    file.path.unlink()
        self._remove_abandoned()

    def _remove_abandoned(self) -> None:
        """Remove what killed processes wrote aside."""
        for file in self._scan(_ASIDE):
            if time.time() - file.used > _ABANDONED:
                with suppress(OSError):
                    file.path.unlink()

    def _files(self) -> list[_File]:
        """The files with names of entries, those used last first.

        Raises:
            DocumentError: the directory cannot be read.
        """
        return sorted(self._scan(_ENTRY), key=lambda file: (-file.used, file.path.name))

    def _scan(self, names: re.Pattern[str]) -> Iterator[_File]:
        if self.directory is None:
            return
        try:
            with os.scandir(self.directory) as found:
                for one in found:
                    if not names.fullmatch(one.name) or not one.is_file(follow_symlinks=False):
                        continue
                    with suppress(FileNotFoundError):  # removed by a job beside this one
                        status = one.stat(follow_symlinks=False)
                        yield _File(Path(one.path), status.st_mtime, status.st_size)
        except FileNotFoundError:
            return
        except OSError as cause:
            raise DocumentError(f"{self.directory}: cannot be read: {cause.strerror}") from None

    def _warn(self, topic: str, message: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(message, stacklevel=3)


def default_directory() -> Path | None:
    """The directory that `VARIABLE` names, else one in the user's cache directory.

    None if `VARIABLE` is empty, which turns the memory off, and without a home directory.
    """
    given = os.environ.get(VARIABLE)
    if given is not None:
        return Path(given) if given else None
    caches = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(caches):  # the specification says to ignore relative paths
        try:
            caches = str(Path.home() / ".cache")
        except RuntimeError:
            return None
    return Path(caches, "lightning-autosync", "plans")


def _remembered(file: _File) -> Remembered:
    try:
        return Remembered(file.path, file.used, _read(file.path), "")
    except DocumentError as error:
        return Remembered(file.path, file.used, None, str(error))


def _read(path: Path) -> TunedPlan:
    """The entry in a file.

    Raises:
        DocumentError: the file cannot be read, or has an entry of another key.
    """
    entry = TunedPlan.load(path)
    if entry.key.fingerprint != path.name.removesuffix(_SUFFIX):
        raise DocumentError(f"{path}: key: the file is named after another key; its own is {entry.key.fingerprint}")
    return entry
