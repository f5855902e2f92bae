"""Pictures of one tuning run: tuning curve, hit rate, predictions, contenders, importances."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from lightning_autosync.report.figures.picture import (
    BLUE,
    GREEN,
    GREY,
    INK,
    MUTED,
    OCHRE,
    ORANGE,
    PURPLE,
    RED,
    TEAL,
    Picture,
    label_ends,
    new_figure,
    styled,
)
from lightning_autosync.report.importance import Importance
from lightning_autosync.report.rendering import milliseconds
from lightning_autosync.report.tuning_run import TuningRun
from lightning_autosync.search.trial_attributes import BASELINE
from lightning_autosync.search.tuning.comparison import FinalComparison
from lightning_autosync.search.tuning.records import TrialRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS: Mapping[str, tuple[str, str, str]] = {
    "plan": (BLUE, "o", "best plan"),
    "finalist": (TEAL, "^", "other finalist"),
    "builder": (GREEN, "D", "best builder"),
    "ddp": (ORANGE, "s", "best DDP"),
    "contender": (GREY, "v", "other contender"),
}
"""Colour, marker and name of each kind of contender."""
_BASELINE_LOOK = (GREY, "s")
_LOOKS = ((BLUE, "o"), (TEAL, "^"), (PURPLE, "D"), (OCHRE, "v"), (INK, "P"), (BLUE, "h"), (TEAL, "p"))
"""Colours and markers of origins, distinct from the lines of DDP and builders and the crosses of failed trials."""
_SCALE = 1.35
"""Upper end of the tuning curve's axis, as a multiple of the slowest of best plan, DDP and builder."""
_STRIP = 0.925
"""Height at which slower trials are drawn, as a share of the axes."""
_WINDOW = 20
"""Number of proposals in the moving hit rate."""
_EDGE = 14
"""Percentage points below 0 and above 100 at which the proposals themselves are drawn."""
_MIN_PREDICTED = 3


def origin_looks(origins: Sequence[str]) -> Mapping[str, tuple[str, str]]:
    """A colour and a marker for each origin, in the given order; builders' plans always look the same."""
    others = [origin for origin in dict.fromkeys(origins) if origin != BASELINE]
    made = {BASELINE: _BASELINE_LOOK} if BASELINE in origins else {}
    return made | {origin: _LOOKS[number % len(_LOOKS)] for number, origin in enumerate(others)}


def _tooltip(trial: TrialRecord) -> str:
    parts = [f"trial {trial.number}", trial.origin + (f" ({trial.builder})" if trial.builder else ""), trial.state]
    if trial.seconds is not None:
        parts.append(f"measured {milliseconds(trial.seconds)}")
    if trial.predicted is not None:
        parts.append(f"predicted when proposed {milliseconds(trial.predicted)}")
    if trial.error:
        parts.append(trial.error)
    return ", ".join(parts)


@styled
def tuning_curve(run: TuningRun) -> Picture:
    """Every trial as a mark by origin and state; the best so far, the opponents and the bound as lines."""
    figure = new_figure(4.6)
    axes = figure.add_subplot()
    limit = _limit(run)
    tooltips = dict([*_draw_trials(axes, run, limit), *_draw_failed(axes, run)])
    lines = [*_draw_best(axes, run), *_draw_opponents(axes, run)]
    lowest = min((value for _, value, _ in lines), default=0.0)
    room = limit - lowest or 0.1 * limit
    axes.set_ylim(limit - 1.08 * room, limit + 0.2 * room)
    ticks = [tick for tick in axes.get_yticks() if limit - 1.08 * room <= tick <= limit]
    axes.set_yticks([*ticks, limit + 0.1 * room], [*(f"{tick:g}" for tick in ticks), "slower"])
    axes.axhline(limit + 0.04 * room, color=MUTED, linewidth=0.8)
    axes.set_xlim(-0.5, run.trials[-1].number + 0.5)
    axes.set_xlabel("trial")
    axes.set_ylabel("milliseconds a step")
    label_ends(axes, lines)
    figure.legend(loc="outside upper left", ncols=7, handletextpad=0.2, columnspacing=1.2)
    states = [trial.state for trial in run.trials]
    words = f"Step time of {len(states)} trials in their order: {states.count('complete')} complete, "
    words += f"{states.count('pruned')} pruned, {states.count('failed')} failed."
    if run.complete_seconds:
        words += f" The best takes {milliseconds(run.best_so_far[-1])}."
    return Picture("curve", figure, words, tooltips)


def _limit(run: TuningRun) -> float:
    """Upper end of the axis in milliseconds. Slower trials are drawn in a strip above, so that the others have room."""
    times = [seconds for trial in run.trials if (seconds := run.seconds(trial)) is not None]
    levels = [seconds for seconds in (run.ddp_seconds, run.builder_seconds) if seconds is not None]
    levels += [seconds for seconds in run.best_so_far if math.isfinite(seconds)][-1:]
    if not times and not levels:
        return 1.0
    return 1e3 * min(max([*times, *levels]), _SCALE * max(levels or times))


def _draw_trials(axes: Axes, run: TuningRun, limit: float) -> Iterator[tuple[str, list[str]]]:
    """Draw the trials; yields the name of each collection of marks and the tooltips of its marks."""
    strip = axes.get_xaxis_transform()
    for origin, (color, marker) in origin_looks([trial.origin for trial in run.trials]).items():
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
                yield f"trials-{origin}-{state}-{beyond:d}", [_tooltip(trial) for trial in chosen]
                label = None


def _draw_failed(axes: Axes, run: TuningRun) -> Iterator[tuple[str, list[str]]]:
    """Draw failed trials as crosses along the upper edge; yields as `_draw_trials`."""
    found = [trial for trial in run.trials if trial.seconds is None or trial.state == "failed"]
    if found:
        numbers = [trial.number for trial in found]
        place: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "gid": "trials-failed", "label": "failed"}
        axes.scatter(numbers, [0.985] * len(found), s=30, marker="x", linewidths=1.3, color=RED, zorder=3, **place)
        yield "trials-failed", [_tooltip(trial) for trial in found]


def _draw_best(axes: Axes, run: TuningRun) -> list[tuple[str, float, str]]:
    best = zip((trial.number for trial in run.trials), run.best_so_far, strict=True)
    known = [(number, 1e3 * seconds) for number, seconds in best if math.isfinite(seconds)]
    if not known:
        return []
    axes.step(*zip(*known, strict=True), where="post", color=INK, linewidth=1.8, zorder=4)
    return [(f"best so far {milliseconds(run.best_so_far[-1])}", known[-1][1], INK)]


def _draw_opponents(axes: Axes, run: TuningRun) -> Iterator[tuple[str, float, str]]:
    levels = [
        ("best DDP", run.ddp_seconds, ORANGE, (0, (6, 2))),
        ("best builder", run.builder_seconds, GREEN, (0, (6, 2, 1, 2))),
        ("bound", None if run.bound is None else run.bound.seconds, MUTED, (0, (1, 2))),
    ]
    for name, seconds, color, dashes in levels:
        if seconds is not None:
            axes.axhline(1e3 * seconds, color=color, linewidth=1.3, linestyle=dashes, zorder=2)
            yield f"{name} {milliseconds(seconds)}", 1e3 * seconds, color


@styled
def hit_rate(run: TuningRun) -> Picture | None:
    """The share of proposals that beat the best builder, overall and in a moving window; None without a hit rate."""
    if run.hit_rate is None:
        return None
    hits = [run.hit(trial) for trial in run.proposals]
    numbers = [trial.number for trial in run.proposals]
    counts = [0, *accumulate(hits)]
    so_far = [100 * count / (index + 1) for index, count in enumerate(counts[1:])]
    recent = [100 * (counts[end] - counts[end - _WINDOW]) / _WINDOW for end in range(_WINDOW, len(hits) + 1)]
    figure = new_figure(3.1)
    axes = figure.add_subplot()
    tooltips = dict(_draw_hits(axes, run.proposals, hits))
    axes.plot(numbers, so_far, color=INK, linewidth=1.8)
    lines = [(f"all so far {so_far[-1]:.0f}%", so_far[-1], INK)]
    if recent:
        axes.plot(numbers[_WINDOW - 1 :], recent, color=BLUE, linewidth=1.4, linestyle=(0, (5, 2)))
        lines.append((f"last {_WINDOW}: {recent[-1]:.0f}%", recent[-1], BLUE))
    axes.set_xlim(-0.5, run.trials[-1].number + 0.5)
    axes.set_ylim(-_EDGE - 6, 100 + _EDGE + 6)
    names = {-_EDGE: "misses", 0: "0%", 25: "25%", 50: "50%", 75: "75%", 100: "100%", 100 + _EDGE: "hits"}
    axes.set_yticks(list(names), list(names.values()))
    for tick, level in zip(axes.yaxis.get_major_ticks(), axes.get_yticks(), strict=True):
        tick.gridline.set_visible(0 <= level <= 100)
    axes.set_xlabel("trial")
    label_ends(axes, lines)
    words = f"Of {len(hits)} proposals {sum(hits)} were faster than the best builder ({so_far[-1]:.0f}%)."
    return Picture("hits", figure, words, tooltips)


def _draw_hits(axes: Axes, proposals: Sequence[TrialRecord], hits: Sequence[bool]) -> Iterator[tuple[str, list[str]]]:
    """Draw a tick for each proposal: hits along the upper edge, misses along the lower; yields as `_draw_trials`."""
    for name, wanted, color, level in (("hits", True, GREEN, 100 + _EDGE), ("misses", False, GREY, -_EDGE)):
        chosen = [trial for trial, hit in zip(proposals, hits, strict=True) if hit == wanted]
        if chosen:
            places = [trial.number for trial in chosen], [level] * len(chosen)
            axes.scatter(*places, marker="|", color=color, s=40, gid=name)
            yield name, [_tooltip(trial) for trial in chosen]


def _predicted(run: TuningRun) -> list[TrialRecord]:
    """Complete trials with a prediction; empty if there are fewer than three."""
    found = [trial for trial in run.trials if trial.state == "complete" and trial.predicted and trial.seconds]
    return found if len(found) >= _MIN_PREDICTED else []


@styled
def predictions_picture(run: TuningRun) -> Picture | None:
    """Measured over predicted seconds of each complete trial; None if fewer than three were predicted."""
    if not (found := _predicted(run)):
        return None
    figure = new_figure(4.4, width=6.4)
    axes = figure.add_subplot()
    tooltips = {}
    values: list[float] = []
    for origin, (color, marker) in origin_looks([trial.origin for trial in found]).items():
        chosen = [trial for trial in found if trial.origin == origin]
        predicted = [1e3 * (trial.predicted or 0.0) for trial in chosen]
        measured = [1e3 * (run.seconds(trial) or 0.0) for trial in chosen]
        name = f"foresight-{origin}"
        look: dict[str, Any] = {"s": 26, "marker": marker, "color": color, "alpha": 0.85, "zorder": 3}
        axes.scatter(predicted, measured, gid=name, label=origin, **look)
        tooltips[name] = [_tooltip(trial) for trial in chosen]
        values += [*predicted, *measured]
    ends = [min(values) * 0.95, max(values) * 1.05]
    axes.plot(ends, ends, color=MUTED, linewidth=1.0, linestyle=(0, (4, 3)))
    if max(values) / min(values) > 3:
        axes.set_xscale("log")
        axes.set_yscale("log")
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    axes.set_xlabel("predicted when proposed, ms a step")
    axes.set_ylabel("measured, ms a step")
    axes.legend(loc="upper left")
    tau = kendall(run)
    words = f"Measured over predicted step time of {len(found)} trials, with a diagonal on which both are equal"
    words += "." if tau is None else f"; Kendall's tau is {tau:.2f}."
    return Picture("foresight", figure, words, tooltips)


def kendall(run: TuningRun) -> float | None:
    """Kendall's tau between predicted and measured seconds of complete trials; None if it is undefined."""
    from scipy.stats import kendalltau

    if not (found := _predicted(run)):
        return None
    tau = kendalltau([trial.predicted for trial in found], [run.seconds(trial) for trial in found]).statistic
    return None if math.isnan(tau) else float(tau)


@styled
def contenders_picture(final: FinalComparison, bound: float | None) -> Picture:
    """One row per contender, fastest first: marks for rounds, a tick at the median, the speedup over the best DDP."""
    compared = final.compared()
    figure = new_figure(1.3 + 0.36 * len(compared))
    axes = figure.add_subplot()
    tooltips = {}
    named: set[str] = set()
    for row, (name, one, speedup) in enumerate(compared):
        color, marker, kind = KINDS[one.kind]
        label = "_" if kind in named else f"{kind}, a mark a round"
        look: dict[str, Any] = {"s": 24, "marker": marker, "color": color, "alpha": 0.7, "zorder": 3, "label": label}
        axes.scatter([1e3 * seconds for seconds in one.rounds], [row] * len(one.rounds), gid=f"rounds-{row}", **look)
        named.add(kind)
        tooltips[f"rounds-{row}"] = [
            f"{name}, round {number + 1}: {milliseconds(seconds)}" for number, seconds in enumerate(one.rounds)
        ]
        axes.plot([1e3 * one.median] * 2, [row - 0.3, row + 0.3], color=INK, linewidth=1.6, zorder=4)
        text = f"{milliseconds(one.median)}, {speedup.median:.2f}x"
        axes.annotate(text, (1e3 * max(one.rounds), row), (8, 0), textcoords="offset points", va="center", fontsize=9)
    if bound is not None:
        axes.axvline(1e3 * bound, color=MUTED, linewidth=1.3, linestyle=(0, (1, 2)), label="bound of exact plans")
    _label_rows(axes, [name for name, _, _ in compared], margin=0.16)
    axes.set_xlabel("milliseconds a step, and speedup over the best DDP")
    figure.legend(loc="outside upper left", ncols=4, handletextpad=0.3)
    words = "; ".join(
        f"{name} {milliseconds(one.median)}, speedup {speedup.median:.2f}" for name, one, speedup in compared
    )
    return Picture("contenders", figure, f"Step times side by side, fastest first: {words}.", tooltips)


@styled
def importance_picture(importance: Importance) -> Picture:
    """One bar for each choice in the space of plans, the most important first."""
    shown = importance.shown
    figure = new_figure(0.9 + 0.29 * len(shown), width=7.2)
    axes = figure.add_subplot()
    axes.barh(range(len(shown)), [100 * share for _, share in shown], color=BLUE, height=0.62)
    for row, (_, share) in enumerate(shown):
        axes.annotate(f"{share:.0%}", (100 * share, row), (5, 0), textcoords="offset points", va="center", fontsize=9)
    _label_rows(axes, [name for name, _ in shown], margin=0.12)
    axes.set_xlabel("% of the importance of all choices")
    words = ", ".join(f"{name} {share:.0%}" for name, share in shown[:5])
    return Picture("importance", figure, f"Importance of choices, the largest first: {words}.")


def _label_rows(axes: Axes, names: Sequence[str], margin: float) -> None:
    """Name the rows from the top, start the x axis at 0, and leave a ``margin`` for text at its end."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.margins(x=margin)
    axes.grid(False, axis="y")
