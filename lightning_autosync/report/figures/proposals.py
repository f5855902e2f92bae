"""How good the sampler's proposals were: against the best builder, and against what the simulator expected."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from lightning_autosync.report.figures.labels import label_ends
from lightning_autosync.report.figures.style import BLUE, GREEN, GREY, INK, MUTED, new_figure, styled
from lightning_autosync.report.figures.svg import Picture
from lightning_autosync.report.figures.trials import looks, tooltip
from lightning_autosync.report.tuning.document import Trial
from lightning_autosync.report.tuning.run import TuningRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WINDOW = 20
"""Proposals over which the moving hit rate is taken."""
_EDGE = 14
"""Percents beyond 0 and 100 at which the proposals themselves are drawn."""
_LEAST_PREDICTED = 3


@styled
def hit_rate(run: TuningRun) -> Picture | None:
    """The share of proposals that beat the best builder: of all so far, and of the last few; None without proposals."""
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


def _draw_hits(axes: Axes, proposals: Sequence[Trial], hits: Sequence[bool]) -> Iterator[tuple[str, list[str]]]:
    """A tick for each proposal, the hits along the upper edge."""
    for name, wanted, color, level in (("hits", True, GREEN, 100 + _EDGE), ("misses", False, GREY, -_EDGE)):
        chosen = [trial for trial, hit in zip(proposals, hits, strict=True) if hit == wanted]
        if chosen:
            places = [trial.number for trial in chosen], [level] * len(chosen)
            axes.scatter(*places, marker="|", color=color, s=40, gid=name)
            yield name, [tooltip(trial) for trial in chosen]


@styled
def foresight(run: TuningRun) -> Picture | None:
    """Measured over predicted seconds of each complete trial; None if fewer than three were predicted."""
    found = [trial for trial in run.trials if trial.state == "complete" and trial.predicted and trial.seconds]
    if len(found) < _LEAST_PREDICTED:
        return None
    figure = new_figure(4.4, width=6.4)
    axes = figure.add_subplot()
    tooltips = {}
    values: list[float] = []
    for origin, (color, marker) in looks([trial.origin for trial in found]).items():
        chosen = [trial for trial in found if trial.origin == origin]
        predicted = [1e3 * (trial.predicted or 0.0) for trial in chosen]
        measured = [1e3 * (run.seconds(trial) or 0.0) for trial in chosen]
        name = f"foresight-{origin}"
        look: dict[str, Any] = {"s": 26, "marker": marker, "color": color, "alpha": 0.85, "zorder": 3}
        axes.scatter(predicted, measured, gid=name, label=origin, **look)
        tooltips[name] = [tooltip(trial) for trial in chosen]
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
    words = (
        f"Measured over predicted step time of {len(found)} trials when proposed, with a diagonal on which both agree"
    )
    words += "." if tau is None else f"; Kendall's tau is {tau:.2f}."
    return Picture("foresight", figure, words, tooltips)


def kendall(run: TuningRun) -> float | None:
    """Kendall's tau between predicted and measured seconds of complete trials; None where it is not defined."""
    from scipy.stats import kendalltau

    found = [t for t in run.trials if t.state == "complete" and t.predicted and t.seconds]
    if len(found) < _LEAST_PREDICTED:
        return None
    tau = kendalltau([trial.predicted for trial in found], [run.seconds(trial) for trial in found]).statistic
    return None if math.isnan(tau) else float(tau)
