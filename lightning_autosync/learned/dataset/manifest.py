"""The manifest of a dataset: its parts and their checksums."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field

from lightning_autosync.documents import Document, Index, Record
from lightning_autosync.errors import DocumentError

MANIFEST = "manifest.json"
Table = Literal["samples", "documents"]
TABLES: tuple[Table, ...] = get_args(Table)
_REMEDIES = {
    "samples": "restore it from a copy, or take its entry out of {manifest} and go on without its {rows} samples",
    "documents": "restore it from a copy; the samples that name its {rows} documents cannot be read without it",
}


class Part(Record):
    """One Parquet file, which never changes once it is named in a manifest.

    Attributes:
        file: its name, beside the manifest.
        table: ``samples``, or the ``documents`` that they name by fingerprint.
        rows: how many.
        bytes: its size.
        sha256: of its bytes.
    """

    file: Annotated[str, Field(pattern=r"^[a-z]+-[0-9]+\.parquet$")]
    table: Table
    rows: Index
    bytes: Index
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Manifest(Document):
    """What belongs to a dataset; files beside it that it does not name are leftovers of an interruption.

    Attributes:
        parts: in the order in which they were added.
    """

    FORMAT: ClassVar[str] = "autosync-dataset/1"

    parts: tuple[Part, ...] = ()

    def of(self, table: Table) -> list[Part]:
        """The parts of one table."""
        return [part for part in self.parts if part.table == table]

    def next_file(self, table: Table, directory: Path) -> str:
        """A name that no part has, and no file of the folder: one after the last, though parts may have been taken out.

        Files that the manifest does not name are leftovers of an interruption or were taken out; none is overwritten.
        """
        names = [part.file for part in self.of(table)] + [path.name for path in part_files(directory, table)]
        numbers = [int(name.partition("-")[2].partition(".")[0]) for name in names]
        return f"{table}-{max(numbers, default=-1) + 1:05d}.parquet"


def describe_part(file: str, table: Table, rows: int, content: bytes) -> Part:
    """The entry of a file with that content."""
    return Part(file=file, table=table, rows=rows, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def part_files(directory: Path, table: Table) -> list[Path]:
    """The files of a folder that are called as parts of a table are, whether or not a manifest names them."""
    return [
        path for path in sorted(directory.glob(f"{table}-*.parquet")) if path.stem.removeprefix(f"{table}-").isdecimal()
    ]


def load_manifest(directory: Path) -> Manifest:
    """The manifest of the dataset in a folder.

    Raises:
        DocumentError: there is none, or it is not one.
    """
    path = directory / MANIFEST
    if path.is_file():
        return Manifest.load(path)
    parts = [part.name for table in TABLES for part in part_files(directory, table)]
    if parts:
        # Not to be made anew: a manifest of new parts would leave out all samples of these.
        raise DocumentError(
            f"{path}: missing, though there are parts that it named ({len(parts)}, the first {parts[0]}); restore it "
            "from a copy, or use another folder"
        )
    raise DocumentError(f"{directory}: no dataset: it has no {MANIFEST}; `autosync collect dataset=DIR` makes one")


def read_part(directory: Path, part: Part) -> bytes:
    """The content of a part.

    Raises:
        DocumentError: the file is not there, truncated or altered; the message says what to do.
    """
    path = directory / part.file
    remedy = _REMEDIES[part.table].format(manifest=MANIFEST, rows=part.rows)
    try:
        content = path.read_bytes()
    except OSError as cause:
        raise DocumentError(f"{path}: cannot be read ({cause.strerror}); {remedy}") from None
    if len(content) < part.bytes:
        raise DocumentError(f"{path}: truncated: {len(content)} of {part.bytes} bytes are there; {remedy}")
    if hashlib.sha256(content).hexdigest() != part.sha256:
        raise DocumentError(f"{path}: altered: its SHA-256 is not the one in {MANIFEST}; {remedy}")
    return content
