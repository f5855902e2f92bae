"""`Writer`: adds entries to a dataset. Its journal holds those that are in no part yet: an interruption loses none."""

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
"""Table, and a row of it."""


def append_rows(path: Path, lines: Iterable[Line]) -> None:
    """Add rows; they outlive this process once this returns. What is left of a line that was cut off is dropped."""
    append_lines(path, "".join(json.dumps({"table": table, "row": row}) + "\n" for table, row in lines))


def read_rows(path: Path) -> Iterator[Line]:
    """The rows in a journal; none if there is no file. A last line cut off by an interruption is left out.

    Raises:
        DocumentError: a line is something else.
    """
    for where, line in whole_lines(path):
        try:
            yield _row(parse_json(line, "its text"))
        except ValueError as cause:
            raise DocumentError(
                f"{where}: not a row: {cause}; delete the line, the pairs that need it are measured again"
            ) from None


def _row(made: Any) -> Line:
    """A line's row; a ValueError says what is wrong with it."""
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
    """Adds entries to the dataset in a folder, which is made if there is none; goes on after an interruption.

    What `append` was given is in a journal when it returns; `flush` makes Parquet files of it. Of a pair (workload,
    cluster and plan) the first measurement stays, but one that was disturbed only until there is one that was not:
    that is added, and readers take it in place of the other.

    Args:
        directory: of the dataset.

    Raises:
        DocumentError: another process adds to it, the manifest of parts that are there is missing, a part is missing,
            truncated or altered, or a line of the journal is no row.
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
        """The pairs (see `sample_key`) that have an undisturbed measurement."""
        return frozenset(self._keys)

    def append(self, entries: Iterable[Entry]) -> int:
        """Add entries of new pairs, and undisturbed ones of pairs that were disturbed; returns their number."""
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
        """Make parts of what is in the journal."""
        parts = [*self._write("documents", self._documents), *self._write("samples", self._samples)]
        if parts:
            # The manifest comes last: until then the new files do not belong to the dataset.
            self._manifest = self._manifest.model_copy(update={"parts": (*self._manifest.parts, *parts)})
        self._manifest.save(self.directory / MANIFEST)
        self._journal.unlink(missing_ok=True)
        self._documents.clear()
        self._samples.clear()

    def close(self) -> None:
        """Flush, and let others add; may be called again."""
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
            # Before any part, so that parts without a manifest always mean that it was lost.
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
        """Read the journal; rows that are in a part already, because of an interruption, are left out.

        Samples whose documents are neither there nor in a part are dropped, since nobody could read them.
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
        """Whether the documents of a sample are there."""
        return all((kind, row[kind]) in self._known for kind in DOCUMENTS)

    def _enter(self, row: Row) -> bool:
        """Note the pair of a row; False if the dataset needs no further row of this pair."""
        key = row_key(row)
        if key in self._keys or (row["disturbed"] and key in self._disturbed):
            return False
        (self._disturbed if row["disturbed"] else self._keys).add(key)
        return True

    def _name(self, kind: str, fingerprint: str, document: dict[str, Any]) -> dict[str, Any] | None:
        """The row of a document, if the dataset does not have it yet."""
        if (kind, fingerprint) in self._known:
            return None
        assert digest(document) == fingerprint
        self._known.add((kind, fingerprint))
        self._documents.append({"kind": kind, "fingerprint": fingerprint, "document": canonical(document)})
        return self._documents[-1]

    def _write(self, table: Table, rows: list[dict[str, Any]]) -> Iterator[DatasetPart]:
        """Write rows as a part, if there are any."""
        if not rows:
            return
        content = to_parquet(table, rows)
        part = describe_part(self._manifest.next_file(table, self.directory), table, len(rows), content)
        write_bytes(self.directory / part.file, content)
        yield part


def _lock(path: Path) -> int:
    """A lock that ends with this process, in whatever way.

    Not `documents.held`, whose locks belong to processes: two writers of one process would both get it.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise DocumentError(f"{path.parent}: another process adds to this dataset; wait for it to end") from None
    return descriptor
