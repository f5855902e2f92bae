"""The parts of a dataset: Parquet files, and the manifest with their checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field

from lightning_autosync.documents import Document, Index, Record, shortened, shown, unknown_name
from lightning_autosync.errors import DocumentError

MANIFEST = "manifest.json"
Table = Literal["samples", "documents"]
TABLES: tuple[Table, ...] = get_args(Table)
_REMEDIES = {
    "samples": "restore it from a copy, or remove its entry from {manifest} to continue without its {rows} samples",
    "documents": "restore it from a copy; samples that need its {rows} documents cannot be read without it",
}


class DatasetPart(Record):
    """One Parquet file, which never changes once a manifest names it.

    Attributes:
        file: file name in the folder of the manifest.
        table: ``samples``, or ``documents``, to which samples refer by fingerprint.
        rows: number of rows.
        bytes: size of the file.
        sha256: checksum of the file.
    """

    file: Annotated[str, Field(pattern=r"^[a-z]+-[0-9]+\.parquet$")]
    table: Table
    rows: Index
    bytes: Index
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Manifest(Document):
    """The list of a dataset's files; other files in its folder are leftovers of an interruption.

    Attributes:
        parts: the parts, in the order in which they were added.
    """

    FORMAT: ClassVar[str] = "autosync-dataset/1"

    parts: tuple[DatasetPart, ...] = ()

    def of(self, table: Table) -> list[DatasetPart]:
        """The parts of one table."""
        return [part for part in self.parts if part.table == table]

    def next_file(self, table: Table, directory: Path) -> str:
        """A new file name, with the number after the last one of all parts and files in the folder.

        Files that the manifest does not name are leftovers of an interruption or were taken out of the manifest. They
        are never overwritten.
        """
        names = [part.file for part in self.of(table)] + [path.name for path in part_files(directory, table)]
        numbers = [int(name.partition("-")[2].partition(".")[0]) for name in names]
        return f"{table}-{max(numbers, default=-1) + 1:05d}.parquet"


def describe_part(file: str, table: Table, rows: int, content: bytes) -> DatasetPart:
    """The manifest's entry for a file with this content."""
    return DatasetPart(
        file=file, table=table, rows=rows, bytes=len(content), sha256=hashlib.sha256(content).hexdigest()
    )


def part_files(directory: Path, table: Table) -> list[Path]:
    """The files of a folder with names of parts, whether or not a manifest names them."""
    return [
        path for path in sorted(directory.glob(f"{table}-*.parquet")) if path.stem.removeprefix(f"{table}-").isdecimal()
    ]


def load_manifest(directory: Path) -> Manifest:
    """The manifest of the dataset in a folder.

    Raises:
        DocumentError: there is none, or it is invalid.
    """
    path = directory / MANIFEST
    if path.is_file():
        return Manifest.load(path)
    parts = [part.name for table in TABLES for part in part_files(directory, table)]
    if parts:
        # Never create a new manifest in this case: it would leave out all samples of the existing parts.
        raise DocumentError(
            f"{path}: missing, but {len(parts)} of its parts exist, such as {parts[0]}; restore it "
            "from a copy, or use another folder"
        )
    raise DocumentError(f"{directory}: not a dataset: it has no {MANIFEST}; `autosync collect dataset=DIR` makes one")


def read_part(directory: Path, part: DatasetPart) -> bytes:
    """The content of a part.

    Raises:
        DocumentError: the file is missing, truncated or altered; the message names a remedy.
    """
    path = directory / part.file
    remedy = _REMEDIES[part.table].format(manifest=MANIFEST, rows=part.rows)
    try:
        content = path.read_bytes()
    except OSError as cause:
        raise DocumentError(f"{path}: cannot be read ({cause.strerror}); {remedy}") from None
    if len(content) < part.bytes:
        raise DocumentError(f"{path}: truncated: it has {len(content)} of {part.bytes} bytes; {remedy}")
    if hashlib.sha256(content).hexdigest() != part.sha256:
        raise DocumentError(f"{path}: altered: its SHA-256 is not the one in {MANIFEST}; {remedy}")
    return content


_LEVEL = 12
"""Compression level of zstd: plans of one workload repeat the names of variables, which only a long window finds."""
_PAGE = 16 * 2**20
"""Bytes of a page, which is compressed as a whole: large enough for all plans of a part."""
_NULLABLE = frozenset({"replayed", "reference", "foreign_cores", "load"})
"""Columns whose values may be unknown."""
_TOLD_BY_ROW = frozenset({"plan", "steps"})
"""Columns whose values are validated only when a sample is read."""


def schema(table: Table) -> Any:
    """The pyarrow schema of a table."""
    from lightning_autosync.learned.dataset.arrow import pyarrow

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
    from lightning_autosync.learned.dataset.arrow import parquet, pyarrow

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
    """Check that a value is a row of a table.

    Raises:
        ValueError: there is no such table, or a column is missing or has another type.
    """
    from lightning_autosync.learned.dataset.arrow import pyarrow

    if table not in TABLES:
        raise ValueError(f"table: {shown(table)} is {unknown_name(table, TABLES)}")
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
        DocumentError: the file is missing, truncated or altered, or does not match the manifest.
    """
    path = directory / part.file
    rows = from_parquet(part.table, read_part(directory, part), str(path))
    if rows.num_rows != part.rows:
        raise DocumentError(
            f"{path}: it has {rows.num_rows} rows, but {MANIFEST} says {part.rows}; restore {MANIFEST} from a copy"
        )
    return rows


def from_parquet(table: Table, content: bytes, source: str) -> Any:
    """The `pyarrow.Table` in a file.

    Args:
        table: name of the table.
        content: content of the file.
        source: name of the file in errors.

    Raises:
        DocumentError: the content is not such a table.
    """
    from lightning_autosync.learned.dataset.arrow import parquet, pyarrow

    columns = schema(table)
    try:
        # Dictionary-encoded columns of different parts have different dictionaries, so decode them for concatenation.
        rows = parquet.read_table(BytesIO(content)).select(columns.names).cast(_decoded(columns))
        rows.validate(full=True)
    except (pyarrow.ArrowException, KeyError, OSError) as cause:  # OSError: damaged within the file
        reason = shortened(str(cause).partition("\n")[0], 300)
        raise DocumentError(f"{source}: not a table of {table}, or of another version: {reason}") from None
    for name in columns.names:
        if name not in _NULLABLE | _TOLD_BY_ROW and rows[name].null_count:
            raise DocumentError(f"{source}: {name}: missing in {rows[name].null_count} of {rows.num_rows} rows")
    return rows


def no_rows(table: Table) -> Any:
    """An empty `pyarrow.Table` with the same schema as from `from_parquet`."""
    return _decoded(schema(table)).empty_table()


def _decoded(columns: Any) -> Any:
    from lightning_autosync.learned.dataset.arrow import pyarrow

    return pyarrow.schema(
        [(field.name, pyarrow.string() if pyarrow.types.is_dictionary(field.type) else field.type) for field in columns]
    )
