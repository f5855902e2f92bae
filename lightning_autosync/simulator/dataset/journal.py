"""The journal of a dataset: rows that are in no part yet, so that an interruption loses none."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lightning_autosync.errors import DocumentError

JOURNAL = "journal.jsonl"
Line = tuple[str, dict[str, Any]]
"""Table, and a row of it."""


def append_lines(path: Path, lines: Iterable[Line]) -> None:
    """Add rows; they outlive this process once this returns."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({"table": table, "row": row}) + "\n" for table, row in lines)


def read_lines(path: Path) -> Iterator[Line]:
    """The rows in a journal; none if there is no file. A last line cut off by an interruption is left out.

    Raises:
        DocumentError: a line is something else.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines):
        if number == len(lines) - 1 and not line.endswith("\n"):
            return
        try:
            made = json.loads(line)
            yield made["table"], dict(made["row"])
        except (TypeError, ValueError, KeyError):
            raise DocumentError(
                f"{path}:{number + 1}: not a row; delete the line, its pair is measured again"
            ) from None
