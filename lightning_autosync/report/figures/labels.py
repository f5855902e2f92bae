"""Names of lines, written beside their ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINE = 0.19
"""Inches that a line of text needs."""


def label_ends(axes: Axes, lines: Sequence[tuple[str, float, str]]) -> None:
    """Write (text, y value, colour) right of the axes, each at its value, moved apart where they would overlap.

    To be called when the limits of the axes are final.
    """
    gap = _LINE / (axes.bbox.height / axes.figure.dpi)
    places = spread([_share(axes, value) for _, value, _ in lines], gap)
    for (text, _, color), place in zip(lines, places, strict=True):
        axes.annotate(
            text,
            (1.0, place),
            xytext=(6, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            va="center",
            color=color,
            fontsize=9,
            annotation_clip=False,
        )


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Places moved as little as one pass needs so that neighbours are at least ``gap`` apart, within 0 to 1."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    made = list(places)
    for before, after in pairwise(order):
        made[after] = max(made[after], made[before] + gap)
    limit = 1.0
    for index in reversed(order):
        made[index] = min(made[index], limit)
        limit = made[index] - gap
    return made


def _share(axes: Axes, value: float) -> float:
    """Where on the y axis a value is, from 0 to 1."""
    low, high = axes.get_ylim()
    if axes.get_yscale() == "log":
        low, high, value = math.log(low), math.log(high), math.log(value)
    return min(1.0, max(0.0, (value - low) / (high - low)))
