"""A hybrid plan as a text table."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.table import Table

from lightning_autosync.documents import table_text
from lightning_autosync.hybrid.plan import HybridPlan, LayerPlan

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A part of a module's path that is the number of a block."""


def plan_table(plan: HybridPlan, width: int = 120) -> str:
    """A text table of the layers; layers of repeated blocks that are split alike share a row."""
    mesh = " x ".join(str(size) for size in plan.mesh)
    gradients = plan.gradients if isinstance(plan.gradients, str) else f"plan {plan.gradients.fingerprint}"
    table = Table(
        title=f"hybrid plan {plan.fingerprint}: mesh {mesh}, gradients by {gradients}",
        title_justify="left",
        header_style="bold",
    )
    table.add_column("layers", overflow="fold")
    for dimension, size in enumerate(plan.mesh):
        table.add_column(f"dimension {dimension} ({size})")
    table.add_column("output")
    for paths, layer in alike_layers(plan.layers):
        parts = f" (in {layer.parts} parts)" if layer.parts > 1 else ""
        table.add_row(paths or "(root)", *layer.signature, " ".join(layer.output or ("-",)) + parts)
    return table_text(table, width)


def alike_layers(layers: Iterable[LayerPlan]) -> list[tuple[str, LayerPlan]]:
    """Sets of layers that are split alike and differ only in block numbers: their paths as one text, and one layer."""
    rows: dict[tuple[object, ...], list[LayerPlan]] = {}
    for layer in layers:
        shape = _NUMBER.sub("*", layer.module)
        rows.setdefault((shape, layer.signature, layer.output, layer.parts), []).append(layer)
    return [(_paths([layer.module for layer in row]), row[0]) for row in rows.values()]


def _paths(paths: list[str]) -> str:
    numbers = [[int(number) for number in _NUMBER.findall(path)] for path in paths]
    columns = iter([sorted(set(column)) for column in zip(*numbers, strict=True)])
    return _NUMBER.sub(lambda _: _ranges(next(columns)), paths[0])


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers as text, with runs shortened: ``0-3,7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
