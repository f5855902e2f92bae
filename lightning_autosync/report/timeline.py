"""The picture of a step, predicted or measured, and its trace for Chrome's viewer."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_autosync.documents import write_text
from lightning_autosync.errors import DocumentError
from lightning_autosync.measure.figures import save_figure
from lightning_autosync.replay.prediction import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {"forward": "#4c78a8", "backward": "#54a24b", "optimizer": "#b279a2"}
_HATCHES = {"forward": "", "backward": "///", "optimizer": "xxx"}
_WAITING, _MOVING, _BUSY = "#c9ced6", "#f58518", "#e45756"
_EDGE = "#fefefe"
"""Of hatches: the paper's colour."""
_MOST_ROWS = 40
_FORMATS = (".svg", ".png")


def draw_timelines(timelines: Mapping[str, Timeline], path: str | os.PathLike[str]) -> None:
    """Draw timelines side by side, over one scale of time.

    From the top: what each rank computes; each message, grey while it waits and coloured while it moves; how busy
    each direction of each link is, where that is known. Of many ranks, messages or links the first ones, busiest links
    first, are shown.

    Args:
        timelines: by title, ``predicted`` and ``measured`` for example.
        path: an ``.svg`` or ``.png`` file.

    Raises:
        DocumentError: the name of the file ends otherwise, or there is nothing to draw.
    """
    path = Path(path)
    if path.suffix not in _FORMATS:
        raise DocumentError(f"{path}: a timeline is drawn as {' or '.join(_FORMATS)}, not '{path.suffix}'")
    if not timelines:
        raise DocumentError(f"{path}: no timeline to draw")
    figure = timelines_figure(timelines, width=7 * len(timelines) + 1)
    save_figure(figure, path, dpi=120)


def timelines_figure(timelines: Mapping[str, Timeline], width: float, most_links: int = _MOST_ROWS) -> Figure:
    """The picture of `draw_timelines`, ``width`` inches wide, with so many of the busiest links at most."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [max(_row_counts(timeline)[k] for timeline in timelines.values()) for k in range(3)]
    ratios = [max(2, rows[0]), max(2, rows[1]), max(2, min(rows[2], most_links))]
    figure = Figure(figsize=(width, 1.5 + 0.24 * sum(ratios)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3, len(timelines), squeeze=False, height_ratios=ratios)
    longest = max(timeline.step_time for timeline in timelines.values())
    for column, (title, timeline) in enumerate(timelines.items()):
        axes[0][column].set_title(f"{title}: {timeline.step_time * 1e3:.1f} ms", loc="left")
        _draw_compute(axes[0][column], timeline)
        _draw_messages(axes[1][column], timeline)
        _draw_links(axes[2][column], timeline, most_links)
        for axis in axes[:2, column]:
            axis.set_xlim(0, longest * 1e3 or 1)
    return figure


def write_trace(timelines: Mapping[str, Timeline], path: str | os.PathLike[str]) -> None:
    """Write timelines in Chrome's trace format, one process each; times are in microseconds there."""
    events = [event for process, (title, one) in enumerate(timelines.items()) for event in _trace(process, title, one)]
    write_text(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n")


def _trace(process: int, title: str, timeline: Timeline) -> list[dict[str, Any]]:
    events = [{"ph": "M", "name": "process_name", "pid": process, "args": {"name": title}}]
    rows = [(f"rank {rank}", list(spans)) for rank, spans in enumerate(timeline.compute)]
    rows += [
        (f"message {message.name}", [Span("wait", message.ready, message.start), message])
        for message in timeline.messages
    ]
    for thread, (name, spans) in enumerate(rows):
        events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}})
        events += [
            {
                "ph": "X",
                "name": span.name,
                "pid": process,
                "tid": thread,
                "ts": span.start * 1e6,
                "dur": span.seconds * 1e6,
            }
            for span in spans
            if span.seconds > 0
        ]
    for name, share in timeline.links.items():
        counter = {"ph": "C", "name": f"link {name}", "pid": process, "args": {"busy share": share}}
        events += [{**counter, "ts": 0.0}, {**counter, "ts": timeline.step_time * 1e6}]
    return events


def _row_counts(timeline: Timeline) -> tuple[int, int, int]:
    counts = len(timeline.compute), len(timeline.messages), len(timeline.links)
    return min(counts[0], _MOST_ROWS), min(counts[1], _MOST_ROWS), min(counts[2], _MOST_ROWS)


def _draw_compute(axis: Axes, timeline: Timeline) -> None:
    for row, spans in enumerate(timeline.compute[:_MOST_ROWS]):
        for span in spans:
            _bar(axis, row, span, _COLORS.get(span.name, _WAITING), _HATCHES.get(span.name, ""))
    _label_rows(axis, [f"rank {rank}" for rank in range(_row_counts(timeline)[0])])
    handles = [
        axis.barh(0, 0, facecolor=color, edgecolor=_EDGE, hatch=_HATCHES[name], linewidth=0, label=name)
        for name, color in _COLORS.items()
    ]
    axis.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize=7, ncols=len(handles))


def _draw_messages(axis: Axes, timeline: Timeline) -> None:
    for row, message in enumerate(timeline.messages[:_MOST_ROWS]):
        _bar(axis, row, Span("wait", message.ready, message.start), _WAITING)
        _bar(axis, row, message, _MOVING)
    handles = [axis.barh(0, 0, color=color, label=name) for color, name in ((_WAITING, "waits"), (_MOVING, "moves"))]
    axis.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize=7, ncols=2)
    _label_rows(axis, [message.name for message in timeline.messages[:_MOST_ROWS]])
    axis.set_xlabel("ms")


def _draw_links(axis: Axes, timeline: Timeline, most: int) -> None:
    if not timeline.links:
        axis.text(0.5, 0.5, "links: not measured", ha="center", va="center", transform=axis.transAxes, fontsize=8)
    busiest = sorted(timeline.links.items(), key=lambda item: -item[1])[:most]
    axis.barh(range(len(busiest)), [100 * share for _, share in busiest], color=_BUSY)
    _label_rows(axis, [name for name, _ in busiest])
    axis.set_xlim(0, 100)
    axis.set_xlabel("busy, % of the step")


def _bar(axis: Axes, row: int, span: Span, color: str, hatch: str = "") -> None:
    if span.seconds > 0:
        place: dict[str, Any] = {"left": span.start * 1e3, "facecolor": color, "edgecolor": _EDGE, "linewidth": 0}
        axis.barh(row, span.seconds * 1e3, hatch=hatch, **place)


def _label_rows(axis: Axes, names: list[str]) -> None:
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.set_ylim(max(len(names), 1) - 0.5, -0.5)
