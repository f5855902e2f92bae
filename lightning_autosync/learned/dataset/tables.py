"""Rows to the bytes of Parquet files and back."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from lightning_autosync.documents import shortened, shown
from lightning_autosync.errors import DocumentError
from lightning_autosync.learned.dataset.manifest import MANIFEST, TABLES, Part, Table, read_part

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
    """The file of some rows."""
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


def read_table(directory: Path, part: Part) -> Any:
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
