"""Contenders side by side, and which parameters mattered."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_autosync.report.figures.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    MUTED,
    ORANGE,
    TEAL,
    new_figure,
    styled,
)
from lightning_autosync.report.figures.svg import Picture
from lightning_autosync.report.tuning.final import Final
from lightning_autosync.report.tuning.importance import Importance
from lightning_autosync.report.units import milliseconds

KINDS: Mapping[str, tuple[str, str, str]] = {
    "plan": (BLUE, "o", "best plan"),
    "finalist": (TEAL, "^", "other finalist"),
    "builder": (GREEN, "D", "best builder"),
    "ddp": (ORANGE, "s", "best DDP"),
    "contender": (GREY, "v", "other contender"),
}
"""Colour, marker and name of each kind of contender."""


@styled
def contenders_picture(final: Final, bound: float | None) -> Picture:
    """A row a contender, fastest first: every round a mark, the median a tick, and the ratio to the best DDP."""
    compared = final.compared()
    figure = new_figure(1.3 + 0.36 * len(compared))
    axes = figure.add_subplot()
    tooltips = {}
    named: set[str] = set()
    for row, (one, ratio) in enumerate(compared):
        color, marker, kind = KINDS[one.kind]
        axes.scatter(
            [1e3 * seconds for seconds in one.rounds],
            [row] * len(one.rounds),
            s=24,
            marker=marker,
            color=color,
            alpha=0.7,
            gid=f"rounds-{row}",
            label="_" if kind in named else f"{kind}, a mark a round",
            zorder=3,
        )
        named.add(kind)
        tooltips[f"rounds-{row}"] = [
            f"{one.name}, round {number + 1}: {milliseconds(seconds)}" for number, seconds in enumerate(one.rounds)
        ]
        axes.plot([1e3 * one.median] * 2, [row - 0.3, row + 0.3], color=INK, linewidth=1.6, zorder=4)
        text = f"{milliseconds(one.median)}, {ratio.median:.2f} x"
        axes.annotate(text, (1e3 * max(one.rounds), row), (8, 0), textcoords="offset points", va="center", fontsize=9)
    if bound is not None:
        axes.axvline(1e3 * bound, color=MUTED, linewidth=1.3, linestyle=(0, (1, 2)), label="bound of exact plans")
    axes.set_yticks(range(len(compared)), [one.name for one, _ in compared])
    axes.set_ylim(len(compared) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.margins(x=0.16)
    axes.grid(False, axis="y")
    axes.set_xlabel("milliseconds a step, and ratio to the best DDP (below 1 is faster)")
    figure.legend(loc="outside upper left", ncols=4, handletextpad=0.3)
    words = "; ".join(f"{one.name} {milliseconds(one.median)}, {ratio.median:.2f} of DDP's" for one, ratio in compared)
    return Picture("contenders", figure, f"Step times side by side, fastest first: {words}.", tooltips)


@styled
def importance_picture(importance: Importance) -> Picture:
    """A bar a parameter, the most important first."""
    shown = importance.shown
    figure = new_figure(0.9 + 0.29 * len(shown), width=7.2)
    axes = figure.add_subplot()
    axes.barh(range(len(shown)), [100 * share for _, share in shown], color=BLUE, height=0.62)
    for row, (_, share) in enumerate(shown):
        axes.annotate(f"{share:.0%}", (100 * share, row), (5, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(shown)), [name for name, _ in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.margins(x=0.12)
    axes.grid(False, axis="y")
    axes.set_xlabel("% of the importance of all parameters")
    words = ", ".join(f"{name} {share:.0%}" for name, share in shown[:5])
    return Picture("importance", figure, f"Importance of parameters, the largest first: {words}.")
