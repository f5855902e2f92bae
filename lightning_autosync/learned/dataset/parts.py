"""The parts of a dataset: Parquet files, and the manifest with their checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field

from lightning_autosync.documents import Document, Index, Record, shortened, shown
from lightning_autosync.errors import DocumentError

MANIFEST = "manifest.json"
Table = Literal["samples", "documents"]
TABLES: tuple[Table, ...] = get_args(Table)
_REMEDIES = {
    "samples": "restore it from a copy, or take its entry out of {manifest} and go on without its {rows} samples",
    "documents": "restore it from a copy; the samples that name its {rows} documents cannot be read without it",
}


class DatasetPart(Record):
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

    parts: tuple[DatasetPart, ...] = ()

    def of(self, table: Table) -> list[DatasetPart]:
        """The parts of one table."""
        return [part for part in self.parts if part.table == table]

    def next_file(self, table: Table, directory: Path) -> str:
        """A name that no part and no file of the folder has: the number after the last.

        Files that the manifest does not name are leftovers of an interruption or were taken out; none is overwritten.
        """
        names = [part.file for part in self.of(table)] + [path.name for path in part_files(directory, table)]
        numbers = [int(name.partition("-")[2].partition(".")[0]) for name in names]
        return f"{table}-{max(numbers, default=-1) + 1:05d}.parquet"


def describe_part(file: str, table: Table, rows: int, content: bytes) -> DatasetPart:
    """The manifest's entry for a file with that content."""
    return DatasetPart(
        file=file, table=table, rows=rows, bytes=len(content), sha256=hashlib.sha256(content).hexdigest()
    )


def part_files(directory: Path, table: Table) -> list[Path]:
    """The files of a folder that have the name of a part, whether or not a manifest names them."""
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


def read_part(directory: Path, part: DatasetPart) -> bytes:
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


_LEVEL = 12
"""Of zstd: plans of one workload repeat the names of its variables, which a long window finds."""
_PAGE = 16 * 2**20
"""Bytes of a page, which is compressed as a whole: large enough for all plans of a part."""
_NULLABLE = frozenset({"replayed", "reference", "foreign_cores", "load"})
"""Columns of what may be unknown."""
_TOLD_BY_ROW = frozenset({"plan", "steps"})
"""Columns of which each is looked at when its sample is asked for."""


def schema(table: Table) -> Any:
    """The pyarrow schema of a table."""
    import pyarrow

    name = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    text, real = pyarrow.string(), pyarrow.float64()
    fields = {
        "samples": {
            "workload": name,
            "cluster": name,
            "environment": name,
            "plan": text,
            "kind": name,
            "seed": pyarrow.int64(),
            "steps": pyarrow.list_(real),
            "replayed": real,
            "reference": real,
            "foreign_cores": real,
            "load": real,
            "disturbed": pyarrow.bool_(),
            "measured_at": pyarrow.int64(),
        },
        "documents": {"kind": name, "fingerprint": text, "document": text},
    }
    return pyarrow.schema(list(fields[table].items()))


def to_parquet(table: Table, rows: Sequence[dict[str, Any]]) -> bytes:
    """Rows as the bytes of a Parquet file."""
    import pyarrow
    from pyarrow import parquet

    columns = schema(table)
    repeated = [field.name for field in columns if pyarrow.types.is_dictionary(field.type)]
    buffer = BytesIO()
    parquet.write_table(
        pyarrow.Table.from_pylist(list(rows), schema=columns),
        buffer,
        compression="zstd",
        compression_level=_LEVEL,
        use_dictionary=repeated,
        data_page_size=_PAGE,
    )
    return buffer.getvalue()


def check_row(table: Any, row: Any) -> None:
    """Refuse what is no row of a table.

    Raises:
        ValueError: there is no such table, or a column is missing or of another type.
    """
    import pyarrow

    if table not in TABLES:
        raise ValueError(f"table: {shown(table)} is none of {', '.join(TABLES)}")
    if not isinstance(row, dict):
        raise ValueError("row: not a mapping of columns")
    for field in schema(table):
        value = row.get(field.name)
        if value is None and field.name not in _NULLABLE:
            raise ValueError(f"row.{field.name}: missing")
        try:
            pyarrow.array([value], field.type)
        except (pyarrow.ArrowException, OverflowError) as cause:
            raise ValueError(f"row.{field.name}: {shortened(str(cause), 300)}") from None


def read_table(directory: Path, part: DatasetPart) -> Any:
    """The `pyarrow.Table` in a part of the dataset in a folder.

    Raises:
        DocumentError: the file is not there, truncated, altered, or not what the manifest says.
    """
    path = directory / part.file
    rows = from_parquet(part.table, read_part(directory, part), str(path))
    if rows.num_rows != part.rows:
        raise DocumentError(f"{path}: it has {rows.num_rows} rows, {part.rows} by {MANIFEST}; restore that from a copy")
    return rows


def from_parquet(table: Table, content: bytes, source: str) -> Any:
    """The `pyarrow.Table` in a file.

    Args:
        table: which.
        content: of the file.
        source: its name, for errors.

    Raises:
        DocumentError: it is no such file.
    """
    import pyarrow
    from pyarrow import parquet

    columns = schema(table)
    try:
        # Dictionaries of different parts differ, so that values are decoded here.
        rows = parquet.read_table(BytesIO(content)).select(columns.names).cast(_decoded(columns))
        rows.validate(full=True)
    except (pyarrow.ArrowException, KeyError, OSError) as cause:  # OSError: damaged within the file
        reason = shortened(str(cause).partition("\n")[0], 300)
        raise DocumentError(f"{source}: not a table of {table} of this version: {reason}") from None
    for name in columns.names:
        if name not in _NULLABLE | _TOLD_BY_ROW and rows[name].null_count:
            raise DocumentError(f"{source}: {name}: missing in {rows[name].null_count} of {rows.num_rows} rows")
    return rows


def no_rows(table: Table) -> Any:
    """The `pyarrow.Table` of no rows, as `from_parquet` gives it."""
    return _decoded(schema(table)).empty_table()


def _decoded(columns: Any) -> Any:
    import pyarrow

    return pyarrow.schema(
        [(field.name, pyarrow.string() if pyarrow.types.is_dictionary(field.type) else field.type) for field in columns]
    )
