"""The tuning curve: every trial, the best so far, and what it has to beat."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lightning_autosync.report.figures.labels import label_ends
from lightning_autosync.report.figures.style import GREEN, INK, MUTED, ORANGE, RED, new_figure, styled
from lightning_autosync.report.figures.svg import Picture
from lightning_autosync.report.figures.trials import looks, tooltip
from lightning_autosync.report.tuning.run import TuningRun
from lightning_autosync.report.units import milliseconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Level = tuple[str, float, str]
"""Label, milliseconds and colour of a line."""
_SCALE = 1.35
"""Times the slowest of best, DDP and builder up to which the scale goes."""
_STRIP = 0.925
"""Height, as a share of the axes, at which slower trials are drawn."""


@styled
def tuning_curve(run: TuningRun) -> Picture:
    """Every trial as a mark by origin and state, the best so far as a line, and the opponents and the bound."""
    figure = new_figure(4.6)
    axes = figure.add_subplot()
    limit = _limit(run)
    tooltips = dict([*_draw_trials(axes, run, limit), *_draw_timeless(axes, run)])
    lines = [*_draw_best(axes, run), *_draw_opponents(axes, run)]
    _scale(axes, min((value for _, value, _ in lines), default=0.0), limit)
    axes.set_xlim(-0.5, run.trials[-1].number + 0.5)
    axes.set_xlabel("trial")
    axes.set_ylabel("milliseconds a step")
    label_ends(axes, lines)
    figure.legend(loc="outside upper left", ncols=7, handletextpad=0.2, columnspacing=1.2)
    return Picture("curve", figure, _curve_words(run), tooltips)


def _scale(axes: Axes, lowest: float, limit: float) -> None:
    """From a little below the lowest line to the limit, and the strip above."""
    room = limit - lowest or 0.1 * limit
    axes.set_ylim(limit - 1.08 * room, limit + 0.2 * room)
    ticks = [tick for tick in axes.get_yticks() if limit - 1.08 * room <= tick <= limit]
    axes.set_yticks([*ticks, limit + 0.1 * room], [*(f"{tick:g}" for tick in ticks), "slower"])
    axes.axhline(limit + 0.04 * room, color=MUTED, linewidth=0.8)


def _limit(run: TuningRun) -> float:
    """Milliseconds up to which the scale goes; what is slower is drawn in a strip above, so that the rest has room."""
    times = [seconds for trial in run.trials if (seconds := run.seconds(trial)) is not None]
    levels = [seconds for seconds in (run.ddp_seconds, run.builder_seconds) if seconds is not None]
    levels += [seconds for seconds in run.best_so_far if math.isfinite(seconds)][-1:]
    if not times and not levels:
        return 1.0
    return 1e3 * min(max([*times, *levels]), _SCALE * max(levels or times))


def _draw_trials(axes: Axes, run: TuningRun, limit: float) -> Iterator[tuple[str, list[str]]]:
    """Yields the name of each collection of marks, and a line for each mark; marks above ``limit`` go to the strip."""
    strip = axes.get_xaxis_transform()
    for origin, (color, marker) in looks([trial.origin for trial in run.trials]).items():
        for state in ("complete", "pruned"):
            found = [t for t in run.trials if (t.origin, t.state) == (origin, state) and t.seconds is not None]
            label: str | None = origin if state == "complete" else f"{origin}, pruned"
            for beyond in (False, True):
                chosen = [t for t in found if (1e3 * (run.seconds(t) or 0.0) > limit) == beyond]
                if not chosen:
                    continue
                place: dict[str, Any] = {"transform": strip} if beyond else {}
                axes.scatter(
                    [trial.number for trial in chosen],
                    [_STRIP if beyond else 1e3 * (run.seconds(trial) or 0.0) for trial in chosen],
                    s=26,
                    marker=marker,
                    linewidths=0.9,
                    edgecolors=color,
                    facecolors=color if state == "complete" else "none",
                    alpha=0.85,
                    gid=f"trials-{origin}-{state}-{beyond:d}",
                    label=label,
                    zorder=3,
                    **place,
                )
                yield f"trials-{origin}-{state}-{beyond:d}", [tooltip(trial) for trial in chosen]
                label = None


def _draw_timeless(axes: Axes, run: TuningRun) -> Iterator[tuple[str, list[str]]]:
    """Failed trials, as crosses along the upper edge."""
    found = [trial for trial in run.trials if trial.seconds is None or trial.state == "failed"]
    if found:
        axes.scatter(
            [trial.number for trial in found],
            [0.985] * len(found),
            s=30,
            marker="x",
            linewidths=1.3,
            color=RED,
            transform=axes.get_xaxis_transform(),
            gid="trials-failed",
            label="failed",
            zorder=3,
        )
        yield "trials-failed", [tooltip(trial) for trial in found]


def _draw_best(axes: Axes, run: TuningRun) -> list[Level]:
    best = zip((trial.number for trial in run.trials), run.best_so_far, strict=True)
    known = [(number, 1e3 * seconds) for number, seconds in best if math.isfinite(seconds)]
    if not known:
        return []
    axes.step(*zip(*known, strict=True), where="post", color=INK, linewidth=1.8, zorder=4)
    return [(f"best so far {milliseconds(run.best_so_far[-1])}", known[-1][1], INK)]


def _draw_opponents(axes: Axes, run: TuningRun) -> list[Level]:
    levels = [
        ("best DDP", run.ddp_seconds, ORANGE, (0, (6, 2))),
        ("best builder", run.builder_seconds, GREEN, (0, (6, 2, 1, 2))),
        ("bound", None if run.bound is None else run.bound.seconds, MUTED, (0, (1, 2))),
    ]
    made = []
    for name, seconds, color, dashes in levels:
        if seconds is not None:
            axes.axhline(1e3 * seconds, color=color, linewidth=1.3, linestyle=dashes, zorder=2)
            made.append((f"{name} {milliseconds(seconds)}", 1e3 * seconds, color))
    return made


def _curve_words(run: TuningRun) -> str:
    states = [trial.state for trial in run.trials]
    words = f"Step time of {len(states)} trials in their order: {states.count('complete')} complete, "
    words += f"{states.count('pruned')} pruned, {states.count('failed')} failed."
    if run.complete_seconds:
        words += f" The best takes {milliseconds(run.best_so_far[-1])}."
    return words
