"""`Writer`: adds entries to a dataset; a journal keeps those that are in no part yet, so interruptions lose none."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_autosync.documents import append_lines, canonical, digest, parse_json, whole_lines, write_bytes
from lightning_autosync.errors import DocumentError
from lightning_autosync.learned.dataset.parts import (
    MANIFEST,
    TABLES,
    DatasetPart,
    Manifest,
    Table,
    check_row,
    describe_part,
    load_manifest,
    part_files,
    read_table,
    to_parquet,
)
from lightning_autosync.learned.dataset.sample import DOCUMENTS, PAIR, Entry, Row, check_steps, row_key

JOURNAL = "journal.jsonl"
Line = tuple[str, dict[str, Any]]
"""The name of a table, and one of its rows."""


def append_rows(path: Path, lines: Iterable[Line]) -> None:
    """Append rows to a journal; once this returns, they survive the end of the process. Drops a truncated last line."""
    append_lines(path, "".join(json.dumps({"table": table, "row": row}) + "\n" for table, row in lines))


def read_rows(path: Path) -> Iterator[Line]:
    """The rows in a journal; none if there is no file. A truncated last line is left out.

    Raises:
        DocumentError: a line is not a row.
    """
    for where, line in whole_lines(path):
        try:
            yield _row(parse_json(line, "its text"))
        except ValueError as cause:
            raise DocumentError(
                f"{where}: not a row: {cause}; delete the line (its pairs are measured again)"
            ) from None


def _row(made: Any) -> Line:
    """The table and the row in a line's data.

    Raises:
        ValueError: it is not a row.
    """
    if not isinstance(made, dict):
        raise ValueError("not a mapping of table and row")
    table: Any = made.get("table")
    row: Any = made.get("row")
    check_row(table, row)
    if table == "samples":
        check_steps(row["steps"])
    return table, row


_LOCK = ".lock"


class Writer:
    """Adds entries to the dataset in a folder, which is created if necessary; resumes after an interruption.

    Entries are in a journal when `append` returns, and `flush` turns the journal into Parquet files. The first
    measurement of a pair (workload, cluster and plan) stays. If it was disturbed, a later undisturbed one is added, and
    readers take that instead.

    Args:
        directory: folder of the dataset.

    Raises:
        DocumentError: another process adds to the dataset, the manifest of existing parts is missing, a part is
            missing, truncated or altered, or a line of the journal is not a row.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._manifest = Manifest()
        self._lock = _lock(self.directory / _LOCK)
        try:
            self._open()
        except BaseException:
            os.close(self._lock)
            raise

    @property
    def keys(self) -> frozenset[str]:
        """Keys (see `sample_key`) of the pairs that have an undisturbed measurement."""
        return frozenset(self._keys)

    def append(self, entries: Iterable[Entry]) -> int:
        """Add entries of new pairs, and undisturbed ones of pairs with a disturbed one; returns the number added."""
        lines: list[Line] = []
        added = 0
        for entry in entries:
            row = entry.row()
            if not self._enter(row):
                continue
            added += 1
            self._samples.append(row)
            for kind, document in entry.documents().items():
                named = self._name(kind, row[kind], document)
                lines += [("documents", named)] if named is not None else []
            lines.append(("samples", row))
        append_rows(self._journal, lines)
        return added

    def flush(self) -> None:
        """Turn the content of the journal into parts."""
        parts = [*self._write("documents", self._documents), *self._write("samples", self._samples)]
        if parts:
            # The manifest comes last: until then the new files do not belong to the dataset.
            self._manifest = self._manifest.model_copy(update={"parts": (*self._manifest.parts, *parts)})
        self._manifest.save(self.directory / MANIFEST)
        self._journal.unlink(missing_ok=True)
        self._documents.clear()
        self._samples.clear()

    def close(self) -> None:
        """Flush and release the lock; may be called repeatedly."""
        if self._lock >= 0:
            self.flush()
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        self._journal = self.directory / JOURNAL
        begun = (self.directory / MANIFEST).exists() or any(part_files(self.directory, table) for table in TABLES)
        if not begun:
            # The manifest is written before any part, so parts without a manifest always mean that it was lost.
            Manifest().save(self.directory / MANIFEST)
        self._manifest = load_manifest(self.directory)
        self._keys: set[str] = set()
        self._disturbed: set[str] = set()
        self._known: set[tuple[str, str]] = set()
        self._documents: list[dict[str, Any]] = []
        self._samples: list[Row] = []
        for part in self._manifest.of("documents"):
            for document in read_table(self.directory, part).select(["kind", "fingerprint"]).to_pylist():
                self._known.add((document["kind"], document["fingerprint"]))
        for part in self._manifest.of("samples"):
            for row in read_table(self.directory, part).select([*PAIR, "disturbed"]).to_pylist():
                self._enter(row)
        self._recover()

    def _recover(self) -> None:
        """Read the journal. Rows that an interrupted flush already wrote to a part are left out.

        Samples whose documents are neither in the journal nor in a part are dropped, because they cannot be read.
        """
        lines = list(read_rows(self._journal))
        for table, row in lines:
            if table == "documents" and (row["kind"], row["fingerprint"]) not in self._known:
                self._known.add((row["kind"], row["fingerprint"]))
                self._documents.append(row)
        for table, row in lines:
            if table == "samples" and self._is_readable(row) and self._enter(row):
                self._samples.append(row)
        if self._journal.exists():
            self.flush()

    def _is_readable(self, row: Row) -> bool:
        """Whether all documents of a sample exist."""
        return all((kind, row[kind]) in self._known for kind in DOCUMENTS)

    def _enter(self, row: Row) -> bool:
        """Record the pair of a row; returns False if the dataset needs no further row of this pair."""
        key = row_key(row)
        if key in self._keys or (row["disturbed"] and key in self._disturbed):
            return False
        (self._disturbed if row["disturbed"] else self._keys).add(key)
        return True

    def _name(self, kind: str, fingerprint: str, document: dict[str, Any]) -> dict[str, Any] | None:
        """Add a document; returns its row, or None if the dataset has it already."""
        if (kind, fingerprint) in self._known:
            return None
        assert digest(document) == fingerprint
        self._known.add((kind, fingerprint))
        self._documents.append({"kind": kind, "fingerprint": fingerprint, "document": canonical(document)})
        return self._documents[-1]

    def _write(self, table: Table, rows: list[dict[str, Any]]) -> Iterator[DatasetPart]:
        """Write rows as a part, if there are any; yields the part's description."""
        if not rows:
            return
        content = to_parquet(table, rows)
        part = describe_part(self._manifest.next_file(table, self.directory), table, len(rows), content)
        write_bytes(self.directory / part.file, content)
        yield part


def _lock(path: Path) -> int:
    """Take a lock that the operating system releases when this process ends; returns its file descriptor.

    This does not use `documents.held`, whose locks belong to processes: two writers in one process would both get it.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise DocumentError(f"{path.parent}: another process adds to this dataset; wait for it to end") from None
    return descriptor
