"""Steps as they were predicted and measured, for a page."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_autosync.replay import Timeline
from lightning_autosync.report.figures.style import WIDTH, styled
from lightning_autosync.report.figures.svg import Picture
from lightning_autosync.report.timeline import timelines_figure
from lightning_autosync.report.units import milliseconds

_BUSIEST = 8
"""Links that are shown; the picture of the cluster has all."""


@styled
def steps_picture(timelines: Mapping[str, Timeline]) -> Picture:
    """Timelines side by side over one scale of time."""
    words = "; ".join(f"{title} {milliseconds(one.step_time)}" for title, one in timelines.items())
    longest = max((one for one in timelines.values()), key=lambda one: one.step_time)
    last = max(longest.messages, key=lambda message: message.end, default=None)
    if last is not None:
        words += f". The last message, {last.name}, ends at {milliseconds(last.end)}"
    description = f"Timeline of one step: what each rank computes, when messages wait and move, busy links. {words}."
    return Picture("steps", timelines_figure(timelines, width=WIDTH, most_links=_BUSIEST), description)
