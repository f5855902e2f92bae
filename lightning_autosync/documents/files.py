"""Files that are written whole, locked, or appended to by whole lines."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import yaml

from lightning_autosync.documents.reading import read_text
from lightning_autosync.errors import DocumentError, UnwritableError

_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""Writes the same as PyYAML's own dumper, many times as fast, where PyYAML has libyaml."""
_BLOCK = 1 << 16
"""Number of bytes read at once in the search for the end of a line."""


def write_data(path: str | os.PathLike[str], data: Any) -> None:
    """Write plain data as JSON if the file's suffix is ``.json``, else as YAML."""
    write_text(path, json.dumps(data, indent=2) + "\n" if Path(path).suffix == ".json" else as_yaml(data))


def as_yaml(data: Any, width: int = 120) -> str:
    """Plain data as YAML, in the given order, in lines of about ``width`` characters."""
    text: str = yaml.dump(data, Dumper=_DUMPER, sort_keys=False, width=width, default_flow_style=None)
    return text


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file atomically, by renaming a temporary file: readers see the whole new file or the old one."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Like `write_text`, for binary content."""
    _write(Path(path), content, os.replace)


def _write(path: Path, content: bytes, publish: Callable[[Path, Path], None]) -> None:
    """Write a temporary file, which ``publish`` then gives its name."""
    # Without the module tempfile, whose files only the owner may read, whatever the umask.
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with aside.open("xb") as file:
                file.write(content)
            publish(aside, path)
        finally:
            aside.unlink(missing_ok=True)


def _link(aside: Path, path: Path) -> None:
    """Give a file a second name, unless another process has given this name to a file."""
    try:
        os.link(aside, path)
    except FileExistsError:
        pass
    except OSError:  # the file system has no hard links
        os.replace(aside, path)


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert system errors within the block to errors that name the file.

    Raises:
        UnwritableError: instead of an ``OSError``.
    """
    try:
        yield
    except UnwritableError:
        raise
    except OSError as cause:
        raise UnwritableError(f"{os.fspath(path)}: cannot be written: {cause.strerror or cause}") from None


def identity(directory: Path) -> str:
    """A unique and persistent name of this directory, which differs from those of equal paths on other machines.

    Raises:
        DocumentError: the file with the name is damaged; a new name would part the directory from its earlier results.
        UnwritableError: the name cannot be written.
    """
    file = directory / ".identity"
    if not file.exists():
        _write(file, f"{directory.absolute()} {secrets.token_hex(4)}\n".encode(), _link)
    name = read_text(file).strip()
    if not name:
        raise DocumentError(
            f"{file}: the file is empty, but must contain the name of this directory: restore it, or use another "
            "directory"
        )
    return name


@contextmanager
def held(path: Path, refusal: Exception) -> Iterator[None]:
    """Hold a lock file within the block; the operating system releases the lock if this process dies.

    Raises ``refusal`` if another process holds the lock.

    Raises:
        UnwritableError: the file cannot be created.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # the error's class and number differ between systems
            raise refusal from None
        yield


def append_lines(path: str | os.PathLike[str], lines: str) -> None:
    """Append whole lines to a file, which is created if necessary.

    A truncated last line, which a killed process may have left, is dropped first. Processes that share a file need a
    lock of their own.
    """
    path = Path(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            file.truncate(_end_of_lines(file))
            file.write(lines.encode())


def _end_of_lines(file: IO[bytes]) -> int:
    """The position behind the last whole line."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
