"""Pictures that compare tuning runs: every seed of every sampler on shared axes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from lightning_autosync.report.figures.picture import (
    DASHES,
    GREEN,
    INK,
    MARKERS,
    MUTED,
    PAPER,
    SERIES,
    Picture,
    label_ends,
    new_figure,
    styled,
)
from lightning_autosync.report.tuning_run import Case, TuningRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Look = tuple[str, str, tuple[float, ...]]
"""Colour, marker and dashes."""


def _looks(cases: Sequence[Case]) -> Mapping[str, Look]:
    """The look of each sampler, which is the same in all pictures."""
    names = dict.fromkeys(group.sampler for case in cases for group in case.groups)
    count = len(SERIES)
    return {name: (SERIES[i % count], MARKERS[i % count], DASHES[i % count]) for i, name in enumerate(names)}


@styled
def speeds_picture(cases: Sequence[Case]) -> Picture:
    """Best plans so far: a thin line for each run, and for each sampler the median as a thick line with the range."""
    columns = 1 if len(cases) == 1 else 2
    rows = -(-len(cases) // columns)
    figure = new_figure(0.5 + 3.4 * rows)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=False).flatten()
    for axes, case in zip(panels, cases, strict=False):
        _draw_speeds(axes, case, _looks(cases))
    for axes in panels[len(cases) :]:
        axes.set_visible(False)
    figure.supylabel("times as fast as the best-tuned DDP", fontsize=10)
    words = []
    for case in cases:
        ends = ", ".join(f"{group.sampler} {group.middle[-1]:.2f}" for group in case.groups if group.middle)
        words.append(f"{case.title}: {ends}")
    text = f"Speed of the best plan so far over that of the best-tuned DDP, by trial. At the end: {'; '.join(words)}."
    return Picture("courses", figure, text)


def _draw_speeds(axes: Axes, case: Case, styles: Mapping[str, Look]) -> None:
    lines = []
    for group in case.groups:
        color, _, dashes = styles[group.sampler]
        style = (0, dashes) if dashes else "-"
        for speeds in group.speeds:
            axes.step(range(1, len(speeds) + 1), speeds, where="post", color=color, linewidth=0.7, alpha=0.55)
        middle, (lowest, highest) = group.middle, group.band
        if not middle:
            continue
        numbers = range(1, len(middle) + 1)
        axes.step(numbers, middle, where="post", color=color, linewidth=2.0, linestyle=style)
        axes.fill_between(numbers, lowest, highest, step="post", color=color, alpha=0.13, linewidth=0)
        lines.append((f"{group.sampler} {middle[-1]:.2f}", middle[-1], color))
    builders = [run.ddp_seconds / run.builder_seconds for run in case.runs if run.ddp_seconds and run.builder_seconds]
    if builders:
        level = statistics.median(builders)
        axes.axhline(level, color=GREEN, linewidth=1.2, linestyle=(0, (6, 2, 1, 2)))
        lines.append((f"best builder {level:.2f}", level, GREEN))
    axes.axhline(1, color=MUTED, linewidth=1.0, linestyle=(0, (1, 2)))
    axes.set_title(case.title)
    axes.set_xlabel("trial")
    axes.set_xlim(left=1)
    axes.set_ylim(bottom=_floor(case))
    label_ends(axes, lines)


def _floor(case: Case) -> float:
    """Lower limit of the axis of speeds: a little below the lowest speed of a plan."""
    known = [value for group in case.groups for speeds in group.speeds for value in speeds if value > 0]
    return min(0.95, *(0.97 * value for value in known)) if known else 0.0


@styled
def outcomes_picture(cases: Sequence[Case]) -> Picture:
    """Speedups over the best DDP and the best builder in the final comparison, with one mark per run."""

    def over(run: TuningRun, opponent: str | None) -> float | None:
        return None if run.final is None or opponent is None else run.final.speedup(opponent).median

    columns: dict[str, Callable[[TuningRun], float | None]] = {
        "times as fast as the best-tuned DDP": lambda run: over(run, run.final.ddp if run.final else None),
        "times as fast as the best builder": lambda run: over(run, run.final.builder if run.final else None),
    }
    text = "How many times as fast as the best-tuned DDP and the best builder each run's best plan was."
    return _dots("outcomes", cases, columns, text, level=1.0)


@styled
def hit_rates_picture(cases: Sequence[Case]) -> Picture:
    """The share of each run's proposals that beat its best builder."""

    def percent(run: TuningRun) -> float | None:
        return None if run.hit_rate is None else 100 * run.hit_rate

    columns: dict[str, Callable[[TuningRun], float | None]] = {"% of proposals that beat the best builder": percent}
    return _dots("hit-rates", cases, columns, "The hit rate of each run.", level=0.0)


def _dots(
    name: str,
    cases: Sequence[Case],
    columns: Mapping[str, Callable[[TuningRun], float | None]],
    words: str,
    level: float,
) -> Picture:
    """Rows of cases and samplers; each column has one mark per run, and a tick at the median."""
    rows = [(case, group) for case in cases for group in case.groups]
    styles = _looks(cases)
    figure = new_figure(0.9 + 0.34 * len(rows) + 0.22 * len(cases))
    panels = figure.subplots(1, len(columns), squeeze=False, sharey=True)[0]
    places = _places(cases)
    tooltips = {}
    for column, (axes, (label, value)) in enumerate(zip(panels, columns.items(), strict=True)):
        for row, (_, group) in enumerate(rows):
            color, marker, _ = styles[group.sampler]
            found = [(run, number) for run in group.runs if (number := value(run)) is not None]
            if not found:
                continue
            numbers = [number for _, number in found]
            gid = f"{name}-{column}-{row}"
            axes.scatter(numbers, [places[row]] * len(numbers), s=30, marker=marker, color=color, alpha=0.75, gid=gid)
            tooltips[gid] = [f"{run.title}, {run.sampler}, seed {run.seed}: {number:.2f}" for run, number in found]
            median = statistics.median(numbers)
            axes.plot([median, median], [places[row] - 0.3, places[row] + 0.3], color=INK, linewidth=1.6)
        axes.axvline(level, color=MUTED, linewidth=1.0, linestyle=(0, (1, 2)))
        axes.set_xlabel(label)
        axes.grid(False, axis="y")
    panels[0].set_yticks(places, [group.sampler for _, group in rows])
    panels[0].set_ylim(places[-1] + 0.6, places[0] - 1.1)
    for row, (case, group) in enumerate(rows):
        if group is case.groups[0]:
            panels[0].annotate(
                case.title,
                (0, places[row] - 0.72),
                xycoords=("axes fraction", "data"),
                va="center",
                fontsize=9,
                fontweight="bold",
                bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.5},
            )
    return Picture(name, figure, words, tooltips)


def _places(cases: Sequence[Case]) -> list[float]:
    """[rows] heights of the rows, with room for a title above the first row of each case."""
    places, height = [], 0.0
    for case in cases:
        height += 0.75
        for _ in case.groups:
            places.append(height)
            height += 1.0
    return places
