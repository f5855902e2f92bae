"""A picture of a job's steps: their times, and how long they waited, from the first to the last."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_autosync.report.figures.picture import (
    BLUE,
    MUTED,
    ORANGE,
    Picture,
    label_ends,
    new_figure,
    styled,
)
from lightning_autosync.report.rendering import milliseconds

_ROOM = 1.15
"""Upper end of the axis, as a multiple of the largest time."""
_MOST = 3.0
"""Upper end of the axis at most, as a multiple of the usual step time, so that one long pause hides nothing."""


@styled
def history_picture(
    steps: Sequence[int], seconds: Sequence[float], waits: Sequence[float], changes: Sequence[int]
) -> Picture:
    """Step times and waits of a job.

    Args:
        steps: number of steps so far, ascending.
        seconds: time of the steps since the number before.
        waits: seconds of a step in which the rank waited.
        changes: numbers of steps by which the job had taken another plan.
    """
    figure = new_figure(3.0)
    axes = figure.add_subplot()
    times, waiting = [1e3 * value for value in seconds], [1e3 * value for value in waits]
    marker = "o" if len(steps) < 40 else None
    axes.plot(steps, times, color=BLUE, linewidth=1.6, marker=marker, markersize=3.5)
    axes.plot(steps, waiting, color=ORANGE, linewidth=1.4, marker=marker, markersize=3.5, linestyle=(0, (5, 2)))
    for step in changes:
        axes.axvline(step, color=MUTED, linewidth=1.0, linestyle=(0, (1, 2)))
    usual = sorted(times)[len(times) // 2]
    axes.set_ylim(0, min(_ROOM * max(*times, *waiting), _MOST * usual) or 1.0)
    axes.set_xlim(0, steps[-1])
    axes.set_xlabel("synchronized steps" + ("; dotted lines: another plan" if changes else ""))
    axes.set_ylabel("milliseconds a step")
    last = f"step {milliseconds(seconds[-1])}", f"wait {milliseconds(waits[-1])}"
    label_ends(axes, [(last[0], times[-1], BLUE), (last[1], waiting[-1], ORANGE)])
    words = f"Times of {steps[-1]} steps. At the end a step takes {milliseconds(seconds[-1])}"
    words += f", of which the rank waits {milliseconds(waits[-1])}."
    return Picture("history", figure, words)
