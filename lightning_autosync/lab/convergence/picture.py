"""The picture of a comparison: the metric over time, a panel for each kind of speeds."""

from __future__ import annotations

import os

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_autosync.lab.convergence.result import Result
from lightning_autosync.lab.convergence.table import title
from lightning_autosync.measure.figures import save_figure


def draw(result: Result, path: str | os.PathLike[str]) -> None:
    """Write the picture; the ending of ``path`` says whether PNG, SVG or PDF."""
    speeds = result.settings.chosen_speeds
    figure = Figure(figsize=(6 * len(speeds), 4.5), layout="constrained")
    panels = figure.subplots(1, len(speeds), squeeze=False, sharey=True)[0]
    for speed, axes in zip(speeds, panels, strict=True):
        _draw_panel(result, speed, axes)
    panels[0].set_ylabel("validation accuracy of the average, %")
    panels[-1].legend(loc="lower right", fontsize=7)
    save_figure(figure, path, dpi=130)


def _draw_panel(result: Result, speed: str, axes: Axes) -> None:
    colours = colormaps["tab20"].colors  # type: ignore[attr-defined]
    for number, name in enumerate(result.settings.chosen_methods):
        colour = colours[number % len(colours)]
        for place, run in enumerate(result.of(name, speed)):
            width = 2.0 if name == result.settings.reference else 0.8
            axes.plot(
                run.moments, run.scores, color=colour, linewidth=width, alpha=0.7, label=name if place == 0 else None
            )
    if result.settings.target is not None:
        axes.axhline(result.settings.target, color="#c0392b", linewidth=1.0)
    axes.set_xlabel("seconds")
    axes.set_title(title(result, speed), fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
