"""`Writer`: adds entries to a dataset."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_autosync.documents import canonical, digest, write_bytes
from lightning_autosync.errors import DocumentError
from lightning_autosync.simulator.dataset.entry import Entry, Row, row_key
from lightning_autosync.simulator.dataset.journal import JOURNAL, Line, append_lines, read_lines
from lightning_autosync.simulator.dataset.manifest import (
    MANIFEST,
    Manifest,
    Part,
    Table,
    describe_part,
    load_manifest,
    read_part,
)
from lightning_autosync.simulator.dataset.tables import from_parquet, to_parquet

_LOCK = ".lock"


class Writer:
    """Adds entries to the dataset in a folder, which is made if there is none; goes on after an interruption.

    What `append` was given is in a journal when it returns; `flush` makes Parquet files of it. A pair (workload,
    cluster and plan) is there once: the first measurement stays.

    Args:
        directory: of the dataset.

    Raises:
        DocumentError: another process adds to it, or a part is missing, truncated or altered.
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
        """The pairs that are there (see `sample_key`)."""
        return frozenset(self._keys)

    def append(self, entries: Iterable[Entry]) -> int:
        """Add entries whose pair is not there yet; returns how many they are."""
        lines: list[Line] = []
        added = 0
        for entry in entries:
            row = entry.row()
            if not self._take(row):
                continue
            added += 1
            for kind, document in entry.documents().items():
                named = self._name(kind, row[kind], document)
                lines += [("documents", named)] if named is not None else []
            lines.append(("samples", row))
        append_lines(self._journal, lines)
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
        if (self.directory / MANIFEST).exists():
            self._manifest = load_manifest(self.directory)
        self._keys: set[str] = set()
        self._known: set[tuple[str, str]] = set()
        self._documents: list[dict[str, Any]] = []
        self._samples: list[Row] = []
        for part in self._manifest.of("documents"):
            for document in self._read(part).select(["kind", "fingerprint"]).to_pylist():
                self._known.add((document["kind"], document["fingerprint"]))
        for part in self._manifest.of("samples"):
            self._keys.update(map(row_key, self._read(part).select(["workload", "cluster", "plan"]).to_pylist()))
        self._recover()

    def _recover(self) -> None:
        """Take up the journal; what an interruption left there although it is in a part already is dropped."""
        for table, row in read_lines(self._journal):
            if table == "samples":
                self._take(row)
            elif (row["kind"], row["fingerprint"]) not in self._known:
                self._known.add((row["kind"], row["fingerprint"]))
                self._documents.append(row)
        if self._journal.exists():
            self.flush()

    def _read(self, part: Part) -> Any:
        return from_parquet(part.table, read_part(self.directory, part), str(self.directory / part.file))

    def _take(self, row: Row) -> bool:
        """Keep a row for the next part unless its pair is there."""
        key = row_key(row)
        if key in self._keys:
            return False
        self._keys.add(key)
        self._samples.append(row)
        return True

    def _name(self, kind: str, fingerprint: str, document: dict[str, Any]) -> dict[str, Any] | None:
        """The row of a document that is not there yet."""
        if (kind, fingerprint) in self._known:
            return None
        assert digest(document) == fingerprint
        self._known.add((kind, fingerprint))
        self._documents.append({"kind": kind, "fingerprint": fingerprint, "document": canonical(document)})
        return self._documents[-1]

    def _write(self, table: Table, rows: list[dict[str, Any]]) -> Iterator[Part]:
        """The part of some rows, if there are any."""
        if not rows:
            return
        content = to_parquet(table, rows)
        part = describe_part(self._manifest.next_file(table), table, len(rows), content)
        write_bytes(self.directory / part.file, content)
        yield part


def _lock(path: Path) -> int:
    """A lock that ends with this process, in whatever way."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise DocumentError(f"{path.parent}: another process adds to this dataset; wait for it to end") from None
    return descriptor
