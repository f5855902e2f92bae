"""Figures and tables of results."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from lightning_autosync.documents import write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_figure(figure: Figure, path: str | os.PathLike[str], dpi: int) -> None:
    """Write a figure atomically, in the format of the suffix of ``path``."""
    content = io.BytesIO()
    figure.savefig(content, format=Path(path).suffix.removeprefix("."), dpi=dpi)
    write_bytes(path, content.getvalue())


def numbers_table(
    title: str, names: Iterable[str], numbers: Iterable[str], caption: str | None = None, wrap: bool = False
) -> Table:
    """A table without rows: columns ``names``, then right-aligned columns ``numbers``."""
    table = Table(title=title, caption=caption)
    for heading in names:
        table.add_column(heading, no_wrap=not wrap)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=not wrap)
    return table
