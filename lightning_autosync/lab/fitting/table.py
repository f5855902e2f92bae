"""The tables that ``autosync fit`` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

_TITLES = {
    "trial": "plans that it did not see",
    "cluster": "clusters that it did not see",
    "model": "families of models that it did not see",
    "both": "neither cluster nor family seen",
}
_COLUMNS = {"ranking": "ranking accuracy", "tau": "Kendall tau", "median": "median error", "p90": "p90 error"}


def tables(comparison: Mapping[str, Mapping[str, Any]]) -> Iterator[Table]:
    """One table a split, one row a simulator, the best of each column in bold; mean and deviation over divisions."""
    for split, rows in comparison.items():
        first = next(iter(rows.values()))
        left_out, count = first["left_out"]["mean"], len(first["left_out"]["runs"])
        table = Table(
            title=f"{split}: {_TITLES[split]}",
            caption=f"{count} divisions; {left_out:.0%} of the pairs are within noise",
        )
        table.add_column("simulator", no_wrap=True)
        for heading in _COLUMNS.values():
            table.add_column(heading, justify="right", no_wrap=True)
        for simulator, metrics in rows.items():
            table.add_row(simulator, *(_cell(rows, simulator, metric, metrics) for metric in _COLUMNS))
        yield table


def _cell(rows: Mapping[str, Any], simulator: str, metric: str, metrics: Mapping[str, Any]) -> str:
    found = metrics[metric]
    text = f"{found['mean']:.3f} ± {found['deviation']:.3f}"
    higher = metric in ("ranking", "tau")
    best = (max if higher else min)(rows, key=lambda name: rows[name][metric]["mean"])
    return f"[bold]{text}[/bold]" if simulator == best else text
