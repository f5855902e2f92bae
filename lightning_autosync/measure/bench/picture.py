"""The picture of a bench run: a bar a contender, a dot a round."""

from __future__ import annotations

import os

from matplotlib.figure import Figure

from lightning_autosync.measure.bench.result import Result
from lightning_autosync.measure.bench.table import by_class, title
from lightning_autosync.measure.figures import save_figure

DDP_COLOUR, BEST_COLOUR, PLAN_COLOUR = "#b8bec8", "#5d6675", "#2a7fb8"


def draw(result: Result, path: str | os.PathLike[str]) -> None:
    """Write the picture; the ending of ``path`` says whether PNG, SVG or PDF."""
    names = by_class(result)
    figure = Figure(figsize=(8, 1.6 + 0.32 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    positions = range(len(names))
    medians = [result.measurements[name].median * 1e3 for name in names]
    axes.barh(positions, medians, color=[_colour(result, name) for name in names])
    for position, name in enumerate(names):
        times = [seconds * 1e3 for seconds in result.measurements[name].times]
        axes.plot(times, [position] * len(times), ".", color="black", markersize=3, alpha=0.5)
        remark = "" if result.classes[name] == "exact" else f", {result.classes[name]}"
        label = f" {medians[position]:.1f} ms, {result.ratio(name).median:.2f}x{remark}"
        axes.annotate(label, (max(times), position), va="center", fontsize=8)
    if result.bound is not None:
        axes.axvline(result.bound.seconds * 1e3, color="#c0392b", linewidth=1.2, label="bound")
        axes.legend(loc="lower right", fontsize=8)
    axes.set_yticks(positions, names, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.22)
    axes.set_xlim(left=0)
    axes.set_xlabel("ms a step (median; dots are rounds), and ratio to the best DDP")
    axes.set_title(title(result), fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    save_figure(figure, path, dpi=150)


def _colour(result: Result, name: str) -> str:
    if name == result.best_ddp:
        return BEST_COLOUR
    return DDP_COLOUR if result.settings.all_contenders()[name].ddp is not None else PLAN_COLOUR
