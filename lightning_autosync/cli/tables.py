"""The console on which verbs print their tables."""

from __future__ import annotations

from rich.console import Console

FILE_WIDTH = 160
"""Width of tables in characters if the output is not a terminal."""


def table_console() -> Console:
    """A console as wide as the terminal; `FILE_WIDTH` wide if the output is none."""
    console = Console()
    return console if console.is_terminal else Console(width=FILE_WIDTH)
