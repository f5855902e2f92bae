"""A picture of a plan: the messages with their gradients and methods, and the ranks that reduce them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from lightning_autosync.documents import bytes_text, counted, short_labels
from lightning_autosync.plan import (
    AllToAll,
    Group,
    Message,
    Schedule,
    SharedMemoryReduce,
    SyncPlan,
    Transfer,
    TreeTransfer,
)
from lightning_autosync.plan.topologies import find
from lightning_autosync.report.figures.picture import BLUE, INK, PAPER, SERIES, Picture, new_figure, styled
from lightning_autosync.workload import Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_ROWS = 48
"""Largest number of messages in the picture; the largest messages are drawn."""
MOST_CHARACTERS = 28
"""Longest name of a message in pictures, if numbers and differences do not need more."""
_MOST_RANKS_WITH_NUMBERS = 16
_FEW = 16
"""Largest number of messages for which rows have the full height."""


def method_of(group: Group) -> str:
    """The method of a group in a few words: topology, local aggregation and compressor."""
    words = find(group.topology).words(group.architecture)
    if group.local_aggregation:
        words += ", summed in the node first"
    return words if group.compressor.kind == "none" else f"{words}, {group.compressor.kind}"


def reducers(message: Message, ranks: int) -> list[float]:
    """[ranks] share of a message that each rank sums; equal shares for a native collective."""
    shares = [0.0] * ranks
    for transfer in message.rounds[0].transfers:
        for rank, elements in _summed_elements(transfer, ranks):
            shares[rank] += elements
    total = sum(shares)
    return [share / total if total else 0.0 for share in shares]


def _summed_elements(transfer: Transfer, ranks: int) -> list[tuple[int, float]]:
    if isinstance(transfer, TreeTransfer):
        return [(transfer.root, transfer.stop - transfer.start)]
    if isinstance(transfer, AllToAll | SharedMemoryReduce):
        owners = transfer.owners if isinstance(transfer, AllToAll) else tuple(range(ranks))
        spans = zip(transfer.bounds, transfer.bounds[1:], strict=False)
        return [(owner, stop - start) for owner, (start, stop) in zip(owners, spans, strict=True)]
    return [(rank, (transfer.stop - transfer.start) / ranks) for rank in range(ranks)]


def shown_groups(plan: SyncPlan, workload: Workload) -> list[int]:
    """Indices of the groups in the picture, in the order in which backward computes their first gradients."""
    place = {name: number for number, name in enumerate(workload.ready_order)}
    sizes = [sum(workload.variable(name).bytes for name in group.variables) for group in plan.groups]
    largest = sorted(range(len(sizes)), key=lambda index: -sizes[index])[:MOST_ROWS]
    return sorted(largest, key=lambda index: min(place[name] for name in plan.groups[index].variables))


@styled
def plan_picture(plan: SyncPlan, schedule: Schedule, workload: Workload) -> Picture:
    """Left: messages over the gradients in backward order, coloured by method. Right: the ranks that reduce them."""
    shown = shown_groups(plan, workload)
    figure = new_figure(1.5 + (0.27 if len(shown) <= _FEW else 0.18) * len(shown))
    ranks = schedule.world_size
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[2.4, max(0.8, min(2.0, 0.14 * ranks + 0.3))])
    tooltips = _draw_messages(left, plan, workload, shown)
    _draw_reducers(right, schedule, shown)
    figure.legend(loc="outside upper left", ncols=3, handlelength=2.2)
    methods = sorted({method_of(group) for group in plan.groups})
    if len(shown) < len(plan.groups):
        left.set_title(f"the {len(shown)} largest of {len(plan.groups)} messages")
    words = f"{counted(len(plan.groups), 'message')} over backward's order of gradients, sent by {', '.join(methods)}"
    return Picture("messages", figure, f"{words}; beside each, the share that every rank reduces.", tooltips)


def _draw_messages(axes: Axes, plan: SyncPlan, workload: Workload, shown: Sequence[int]) -> dict[str, list[str]]:
    order = workload.ready_order
    ends = list(accumulate(workload.variable(name).bytes / 1e6 for name in order))
    begins = dict(zip(order, [0.0, *ends], strict=False))
    methods = list(dict.fromkeys(method_of(group) for group in plan.groups))
    tooltips = {}
    for row, index in enumerate(shown):
        group = plan.groups[index]
        number = methods.index(method_of(group)) % len(SERIES)
        spans = [(begins[name], workload.variable(name).bytes / 1e6) for name in group.variables]
        bars = axes.broken_barh(
            spans,
            (row - 0.38, 0.76),
            facecolor=SERIES[number],
            edgecolor=PAPER,
            hatch=find(group.topology).hatch,
            linewidth=0.4,
            gid=f"message-{index}",
        )
        bars.set_label(_first(method_of(group), plan, shown, index))
        tooltips[f"message-{index}"] = [
            f"{name}, {bytes_text(workload.variable(name).bytes)}, in {group.name}: {method_of(group)}"
            for name in group.variables
        ]
    axes.set_yticks(range(len(shown)), short_labels([plan.groups[index].name for index in shown], MOST_CHARACTERS))
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, ends[-1] if ends and ends[-1] else 1)
    axes.set_xlabel("MB of gradients, in the order in which backward makes them")
    axes.grid(False, axis="y")
    return tooltips


def _first(method: str, plan: SyncPlan, shown: Sequence[int], index: int) -> str:
    """The legend label: the method for the first message with it, else ``_``, which matplotlib leaves out."""
    first = next(one for one in shown if method_of(plan.groups[one]) == method)
    return method if first == index else "_"


def _draw_reducers(axes: Axes, schedule: Schedule, shown: Sequence[int]) -> None:
    from matplotlib.colors import to_rgba

    ranks = schedule.world_size
    cells = [
        (row, rank, share)
        for row, index in enumerate(shown)
        for rank, share in enumerate(reducers(schedule.messages[index], ranks))
        if share > 0
    ]
    if cells:
        colors = [to_rgba(BLUE, 0.12 + 0.5 * share) for _, _, share in cells]
        rows, lefts = [row for row, _, _ in cells], [rank - 0.46 for _, rank, _ in cells]
        axes.barh(rows, 0.92, left=lefts, height=0.76, color=colors)
    for row, rank, share in cells if ranks <= _MOST_RANKS_WITH_NUMBERS else ():
        axes.text(rank, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=8, color=INK)
    axes.set_xlim(-0.6, ranks - 0.4)
    step = max(1, ranks // _MOST_RANKS_WITH_NUMBERS)
    axes.set_xticks(range(0, ranks, step))
    axes.set_xlabel("% reduced by rank")
    axes.tick_params(left=False)
    axes.grid(False)
    axes.spines["left"].set_visible(False)
