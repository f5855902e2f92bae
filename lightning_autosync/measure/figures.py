"""Saves figures to files."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_autosync.documents import write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_figure(figure: Figure, path: str | os.PathLike[str], dpi: int) -> None:
    """Write a figure atomically, in the format of the suffix of ``path``."""
    content = io.BytesIO()
    figure.savefig(content, format=Path(path).suffix.removeprefix("."), dpi=dpi)
    write_bytes(path, content.getvalue())
