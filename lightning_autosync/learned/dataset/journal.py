"""The journal of a dataset: rows that are in no part yet, so that an interruption loses none."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lightning_autosync.documents import append_lines, parse_json, whole_lines
from lightning_autosync.errors import DocumentError
from lightning_autosync.learned.dataset.sample import check_steps
from lightning_autosync.learned.dataset.tables import check_row

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
