"""The tables and the figure of a comparison."""

from __future__ import annotations

import math
import os

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from lightning_autosync.lab.convergence.result import ConvergenceResult, Summary
from lightning_autosync.measure.conditions import BUSY_CORES
from lightning_autosync.measure.figures import numbers_table, save_figure

FEW = 5
"""Maximum number of times that are shown one by one. Of more times, only the shortest and the longest are shown."""


def result_table(result: ConvergenceResult, speed: str) -> Table:
    """One row per method under some speeds; the reference is bold."""
    timed = result.settings.target is not None
    headings = ["rate", "runs", "final %", "points"]
    if timed:
        headings += [f"s to {result.settings.target:g} %", "each run", "speedup"]
    headings += ["steps/s", "waiting", "kB/step", "most", "state kB", "most"]
    table = numbers_table(title(result, speed), ("method",), headings)
    for name in result.settings.chosen_methods:
        summary = result.summary(name, speed)
        cells = [
            name,
            f"{result.rates[name]:g}",
            str(summary.runs),
            f"{summary.final:.2f} ± {summary.deviation:.2f}",
            f"{summary.difference:+.2f}",
            *(_time_cells(summary) if timed else ()),
            f"{summary.steps:.0f}",
            f"{summary.waiting:.0%}",
            *("?" if size is None else f"{size / 1e3:.1f}" for size in (summary.sent, summary.sent_most)),
            *(f"{size / 1e3:.1f}" for size in (summary.state_bytes, summary.state_most)),
        ]
        table.add_row(*cells, style="bold" if name == result.settings.reference else None)
    return table


def title(result: ConvergenceResult, speed: str) -> str:
    """Task, workers and speeds in one line."""
    settings = result.settings
    compute = "" if settings.pace is None else f", steps paced at {settings.pace * 1e3:g} ms"
    links = ", emulated links" if settings.emulated else ""
    return f"{settings.task.kind}, {settings.workers} workers, {speed}{compute}{links}"


def remarks(result: ConvergenceResult) -> list[str]:
    """Explanations of the tables."""
    settings = result.settings
    lines = [
        f"final %: validation metric, mean and deviation over seeds; points: difference from {settings.reference}",
        "kB/step: kB that a rank sends per step by the kernel's count (median rank, then the rank that sends most); "
        f"a ring all-reduce sends {result.ring_bytes / 1e3:.1f} for a model of {result.model_bytes / 1e3:.1f} kB",
        "state kB: optimizer state after the last step (median rank, then the rank that has most), without temporary "
        "buffers of exchanges (flat copies of the model, messages)",
        "steps/s: sum over all workers",
        "waiting: share of time from the end of a worker's computation to its next step (exchange, waiting, optimizer "
        "step); synchronous methods exchange during backward, so theirs starts with backward",
        *_group_remarks(result),
    ]
    if settings.target is not None:
        lines.append(
            "s: time until the average of all replicas reached the target (median over seeds); each run: the time of "
            f"each run, or shortest .. longest of more than {FEW} runs"
        )
    if settings.limit is not None:
        lines.append(
            f"each training ends after {settings.limit:g} s, or when rank 0's own model stays above the target"
        )
    busy = [run.foreign_cores for run in result.runs if run.foreign_cores is not None]
    if busy and sum(busy) / len(busy) > BUSY_CORES:
        mean = sum(busy) / len(busy)
        lines.append(f"other processes or virtual machines kept {mean:.1f} cores busy; repeat this on an idle machine")
    return lines


def _group_remarks(result: ConvergenceResult) -> list[str]:
    """For each partial reduce, whether its groups connected all workers."""
    lines = []
    for speed in result.settings.chosen_speeds:
        for name in result.settings.chosen_methods:
            found = result.summary(name, speed)
            if found.bridging is not None:
                lines.append(
                    f"groups of {name}, {speed}: {found.bridging:.1%} formed to connect workers; {found.apart} of "
                    f"{found.windows} windows of twice the bound left workers unconnected; waiting {found.waiting:.0%}"
                )
    return lines


def _time_cells(summary: Summary) -> tuple[str, str, str]:
    assert summary.reached is not None
    missed = summary.runs - len(summary.times)
    shown = [f"{seconds:.2f}" for seconds in summary.times]
    spread = " ".join(shown) if len(shown) <= FEW else f"{shown[0]} .. {shown[-1]}"
    return (
        f"{summary.reached:.2f}" if math.isfinite(summary.reached) else "never",
        ", ".join([spread] * bool(shown) + [f"{missed} never"] * bool(missed)),
        "" if summary.faster is None else f"{summary.faster:.2f}x",
    )


def draw(result: ConvergenceResult, path: str | os.PathLike[str]) -> None:
    """Write the figure; the suffix of ``path`` selects PNG, SVG or PDF."""
    speeds = result.settings.chosen_speeds
    figure = Figure(figsize=(6 * len(speeds), 4.5), layout="constrained")
    panels = figure.subplots(1, len(speeds), squeeze=False, sharey=True)[0]
    for speed, axes in zip(speeds, panels, strict=True):
        _draw_panel(result, speed, axes)
    panels[0].set_ylabel("validation accuracy of the average, %")
    panels[-1].legend(loc="lower right", fontsize=7)
    save_figure(figure, path, dpi=130)


def _draw_panel(result: ConvergenceResult, speed: str, axes: Axes) -> None:
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
