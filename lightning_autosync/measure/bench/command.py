"""``autosync bench``: measure contenders side by side, print the table, leave result and picture."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_autosync.documents import write_text
from lightning_autosync.errors import UnwritableError
from lightning_autosync.measure.bench.picture import draw
from lightning_autosync.measure.bench.result import Result
from lightning_autosync.measure.bench.run import run_bench
from lightning_autosync.measure.bench.settings import Settings
from lightning_autosync.measure.bench.table import remarks, result_table

FILE_WIDTH = 130
"""Columns of the table where it does not go to a terminal."""


def bench(configuration: dict[str, Any], directory: Path) -> Result:
    """Run one bench; ``result.json`` and ``result.png`` appear in ``directory``. Returns what was found.

    After each round ``result.json`` has what there is by then, for the case that the run is cut short. Where it cannot
    be written, the bench goes on, prints what it found, and then fails.

    Raises:
        AutoSyncError: a setting is wrong, or a worker failed.
        UnwritableError: a file cannot be written.
    """

    def keep(result: Result) -> None:
        write_text(directory / "result.json", json.dumps(result.to_dict()) + "\n")

    def keep_if_possible(result: Result) -> None:
        with suppress(UnwritableError):
            keep(result)

    result = run_bench(Settings.parse(configuration), keep_if_possible)
    console = Console()
    if not console.is_terminal:
        console = Console(width=FILE_WIDTH)
    console.print(result_table(result))
    for line in remarks(result):
        console.print(line, soft_wrap=True, highlight=False)
    keep(result)
    draw(result, directory / "result.png")
    console.print(f"{directory / 'result.json'}, {directory / 'result.png'}", soft_wrap=True, highlight=False)
    return result
