"""Predicted or measured timelines of a step, as pictures, as traces for Chrome's viewer, and as files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import check_format, checked, read_data, short_labels, write_text
from lightning_autosync.errors import DocumentError
from lightning_autosync.measure.figures import save_figure
from lightning_autosync.plan import SyncPlan, compile_plan
from lightning_autosync.replay import Constants, Replay, Span, Timeline
from lightning_autosync.report.figures.picture import WIDTH, Picture, new_figure, styled
from lightning_autosync.report.figures.plan import MOST_CHARACTERS
from lightning_autosync.report.rendering import milliseconds
from lightning_autosync.workload import Workload

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMAT = "autosync-timelines/1"
TIMELINES = "timelines.json"
"""Name of the file in a run directory."""
_COLORS = {"forward": "#4c78a8", "backward": "#54a24b", "optimizer": "#b279a2"}
_HATCHES = {"forward": "", "backward": "///", "optimizer": "xxx"}
_WAITING, _MOVING, _BUSY = "#c9ced6", "#f58518", "#e45756"
_EDGE = "#fefefe"
"""Colour of hatches, which is that of the page."""
_MAX_ROWS = 40
"""Largest number of ranks, and of links, in a picture."""
_ROW, _LOW_ROW = 0.24, 0.15
"""Inches of a row, and of one where a picture has more than `_MAX_ROWS` rows of messages."""
_MAX_LINKS = 8
"""Largest number of links in the timelines of a report; its picture of the cluster shows all."""
_IMAGES = (".svg", ".png")
Row = tuple[str, Sequence[int]]
"""The label of a row, and the indices of its messages."""
MOST_ROWS = 100
"""Largest number of rows of messages in a picture."""
_PARTS = re.compile(r"[./]")


def compare_timelines(
    measured: Timeline,
    plan: SyncPlan,
    workload: Workload,
    cluster: ClusterSpec,
    directory: str | os.PathLike[str],
    constants: Constants | None = None,
) -> None:
    """Write a measured step of a plan and the predicted one, side by side, to ``directory``.

    The files are those of `write_timelines` and ``timelines.json``. ``constants`` are the costs of the hosts; None
    takes the defaults.

    Raises:
        AutoSyncError: plan, workload and cluster do not fit each other.
    """
    prediction = Replay(workload, cluster, constants).predict(compile_plan(plan, workload, cluster))
    timelines = {"measured": measured, "predicted": prediction.timeline}
    write_timelines(timelines, directory)
    save_timelines(timelines, Path(directory) / TIMELINES)


def write_timelines(timelines: Mapping[str, Timeline], directory: str | os.PathLike[str]) -> None:
    """Write ``timeline.svg``, ``timeline.png`` and ``trace.json``, a trace for Chrome's viewer, to ``directory``."""
    draw_timelines(timelines, Path(directory) / "timeline.svg", Path(directory) / "timeline.png")
    write_trace(timelines, Path(directory) / "trace.json")


def draw_timelines(timelines: Mapping[str, Timeline], *paths: str | os.PathLike[str]) -> None:
    """Draw timelines side by side on the same time scale, once for all files.

    The rows show, from the top: what each rank computes; each message, grey while it waits and coloured while it moves;
    the busy share of each direction of each link, if known. At most 40 ranks and links are shown: the first ranks, and
    the busiest links. If there are more than 100 messages, the messages of a layer share a row (see `timeline_rows`).

    Args:
        timelines: timelines by title, for example ``predicted`` and ``measured``.
        paths: ``.svg`` or ``.png`` files.

    Raises:
        DocumentError: a file has another suffix, or there is nothing to draw.
    """
    for path in map(Path, paths):
        if path.suffix not in _IMAGES:
            raise DocumentError(f"{path}: cannot draw a timeline as '{path.suffix}'; allowed: {', '.join(_IMAGES)}")
        if not timelines:
            raise DocumentError(f"{path}: no timeline to draw")
    figure = timelines_figure(timelines, width=7 * len(timelines) + 1)
    for file in paths:
        save_figure(figure, file, dpi=120)
        figure.set_layout_engine("none")  # which has found all places for all formats


def timelines_figure(timelines: Mapping[str, Timeline], width: float, max_links: int = _MAX_ROWS) -> Figure:
    """The figure of `draw_timelines`, ``width`` inches wide, with at most ``max_links`` links."""
    rows = {title: timeline_rows([one.name for one in timeline.messages]) for title, timeline in timelines.items()}
    ranks = max(len(timeline.compute) for timeline in timelines.values())
    messages = max(map(len, rows.values()))
    links = max(len(timeline.links) for timeline in timelines.values())
    height = _ROW if messages <= _MAX_ROWS else _LOW_ROW
    ratios = [_ROW * max(2, min(ranks, _MAX_ROWS)), height * max(2, messages), _ROW * max(2, min(links, max_links))]
    figure = new_figure(1.5 + sum(ratios), width)
    axes = figure.subplots(3, len(timelines), squeeze=False, height_ratios=ratios)
    longest = max(timeline.step_time for timeline in timelines.values())
    for column, (title, timeline) in enumerate(timelines.items()):
        axes[0][column].set_title(f"{title}: {timeline.step_time * 1e3:.1f} ms", loc="left", pad=20)  # above the legend
        _draw_compute(axes[0][column], timeline)
        _draw_messages(axes[1][column], timeline, rows[title])
        _draw_links(axes[2][column], timeline, max_links)
        for axis in axes[:2, column]:
            axis.set_xlim(0, longest * 1e3 or 1)
        if column and rows[title] == rows[next(iter(rows))]:
            axes[1][column].set_yticklabels([])
    figure.legend(handles=_legend(), loc="outside upper right", fontsize=7, ncols=5)
    return figure


@styled
def steps_picture(timelines: Mapping[str, Timeline]) -> Picture:
    """The same for a page."""
    words = "; ".join(f"{title} {milliseconds(one.step_time)}" for title, one in timelines.items())
    longest = max((one for one in timelines.values()), key=lambda one: one.step_time)
    last = max(longest.messages, key=lambda message: message.end, default=None)
    if last is not None:
        words += f". The last message, {last.name}, ends at {milliseconds(last.end)}"
    description = f"Timeline of one step: what each rank computes, when messages wait and move, busy links. {words}."
    return Picture("steps", timelines_figure(timelines, width=WIDTH, max_links=_MAX_LINKS), description)


def save_timelines(timelines: Mapping[str, Timeline], path: str | os.PathLike[str]) -> None:
    """Write timelines by title, so that reports can draw them later."""
    data = {"format": FORMAT, "timelines": {title: one.to_dict() for title, one in timelines.items()}}
    write_text(path, json.dumps(data) + "\n")


def load_timelines(path: str | os.PathLike[str]) -> dict[str, Timeline]:
    """Read timelines by title.

    Raises:
        DocumentError: the file is not a file of timelines.
    """
    data = read_data(path)
    if not isinstance(data, dict):
        raise DocumentError(f"{path}: expected a mapping of fields, got {type(data).__name__}")
    check_format(data.get("format"), FORMAT, str(path), DocumentError)
    return checked(dict[str, Timeline], data.get("timelines"), f"{path}: timelines")


def write_trace(timelines: Mapping[str, Timeline], path: str | os.PathLike[str]) -> None:
    """Write timelines in Chrome's trace format, one process per timeline, with times in microseconds."""
    events = [event for process, (title, one) in enumerate(timelines.items()) for event in _trace(process, title, one)]
    write_text(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n")


def _trace(process: int, title: str, timeline: Timeline) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": process, "args": {"name": title}}]
    rows = [(f"rank {rank}", list(spans)) for rank, spans in enumerate(timeline.compute)]
    rows += [
        (f"message {message.name}", [Span("wait", message.ready, message.start), message])
        for message in timeline.messages
    ]
    for thread, (name, spans) in enumerate(rows):
        place = {"pid": process, "tid": thread}
        events.append({**place, "ph": "M", "name": "thread_name", "args": {"name": name}})
        events += [
            {**place, "ph": "X", "name": one.name, "ts": one.start * 1e6, "dur": one.seconds * 1e6}
            for one in spans
            if one.seconds > 0
        ]
    for name, share in timeline.links.items():
        counter = {"ph": "C", "name": f"link {name}", "pid": process, "args": {"busy share": share}}
        events += [{**counter, "ts": 0.0}, {**counter, "ts": timeline.step_time * 1e6}]
    return events


def _draw_compute(axis: Axes, timeline: Timeline) -> None:
    bars = [(row, span) for row, spans in enumerate(timeline.compute[:_MAX_ROWS]) for span in spans]
    for name in dict.fromkeys(span.name for _, span in bars):
        own = [(row, span) for row, span in bars if span.name == name]
        _draw_bars(axis, own, _COLORS.get(name, _WAITING), _HATCHES.get(name, ""))
    ranks = len(timeline.compute)
    _label_rows(axis, [f"rank {rank}" for rank in range(min(ranks, _MAX_ROWS))])
    if ranks > _MAX_ROWS:
        axis.set_xlabel(f"the first {_MAX_ROWS} of {ranks} ranks")


def _legend() -> list[Artist]:
    from matplotlib.patches import Patch

    look: dict[str, Any] = {"edgecolor": _EDGE, "linewidth": 0}
    handles: list[Artist] = [
        Patch(facecolor=color, hatch=_HATCHES[name], label=name, **look) for name, color in _COLORS.items()
    ]
    messages = (_WAITING, "message waits"), (_MOVING, "message moves")
    return [*handles, *(Patch(facecolor=color, label=label, **look) for color, label in messages)]


def _draw_messages(axis: Axes, timeline: Timeline, rows: Sequence[Row]) -> None:
    moving = [(row, timeline.messages[index]) for row, (_, members) in enumerate(rows) for index in members]
    _draw_bars(axis, [(row, Span("wait", one.ready, one.start)) for row, one in moving], _WAITING)
    _draw_bars(axis, moving, _MOVING)
    _label_rows(axis, short_labels([label for label, _ in rows], MOST_CHARACTERS), 7 if len(rows) <= _MAX_ROWS else 6.5)
    few = len(rows) == len(timeline.messages)
    axis.set_xlabel("ms" if few else f"ms; {len(timeline.messages)} messages in {len(rows)} rows")


def _draw_links(axis: Axes, timeline: Timeline, most: int) -> None:
    if not timeline.links:
        axis.text(0.5, 0.5, "links: not measured", ha="center", va="center", transform=axis.transAxes, fontsize=8)
        axis.set_axis_off()
        return
    busiest = sorted(timeline.links.items(), key=lambda item: -item[1])[:most]
    axis.barh(range(len(busiest)), [100 * share for _, share in busiest], color=_BUSY)
    _label_rows(axis, [name for name, _ in busiest])
    axis.set_xlim(0, 100)
    left_out = f", the {most} busiest of {len(timeline.links)}" if len(timeline.links) > most else ""
    axis.set_xlabel(f"busy, % of the step{left_out}")


def _draw_bars(axis: Axes, bars: Sequence[tuple[int, Span]], color: str, hatch: str = "") -> None:
    """Draw spans in their rows; all at once, since each call takes milliseconds."""
    shown = [(row, span) for row, span in bars if span.seconds > 0]
    if shown:
        rows, widths, lefts = zip(*((row, 1e3 * span.seconds, 1e3 * span.start) for row, span in shown), strict=True)
        axis.barh(rows, widths, left=lefts, facecolor=color, edgecolor=_EDGE, linewidth=0, hatch=hatch)


def _label_rows(axis: Axes, names: list[str], size: float = 7) -> None:
    axis.set_yticks(range(len(names)), names, fontsize=size)
    axis.set_ylim(max(len(names), 1) - 0.5, -0.5)


def timeline_rows(names: Sequence[str], most: int = MOST_ROWS) -> list[Row]:
    """The rows for messages with these names.

    Up to ``most`` messages have a row each. Otherwise the messages of a layer share one. Layers are parts of a model's
    path, as deep as they leave at most ``most`` rows: ``encoder.11.attention``, then ``encoder.11``, then ``encoder``.
    Names without a path, as of fused messages, share rows in their order: ``bucket0 to bucket3``.

    Args:
        names: names of the messages in schedule order.
        most: largest number of rows.

    Returns:
        The rows, in the order of their first messages. A label of several messages ends with their number:
        ``encoder.11 (12)``.
    """
    if len(names) <= most:
        return [(name, [index]) for index, name in enumerate(names)]
    paths = [_PARTS.split(name) for name in names]
    for depth in range(max(map(len, paths)) - 1, 0, -1):
        layers = _gathered([".".join(path[:depth]) for path in paths])
        if 1 < len(layers) <= most:
            return [_counted(layer, members) for layer, members in layers.items()]
    length = -(-len(names) // most)
    runs = [range(start, min(start + length, len(names))) for start in range(0, len(names), length)]
    return [_counted(f"{names[run[0]]} to {names[run[-1]]}" if len(run) > 1 else names[run[0]], run) for run in runs]


def _gathered(keys: Sequence[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for index, key in enumerate(keys):
        found.setdefault(key, []).append(index)
    return found


def _counted(label: str, members: Sequence[int]) -> Row:
    return (label if len(members) == 1 else f"{label} ({len(members)})"), members
