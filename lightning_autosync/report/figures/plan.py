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


def interface_shares(message: Message, interfaces: int) -> list[float]:
    """[interfaces] share of a message that travels over each interface of the nodes; all but trees use the first."""
    shares = [0.0] * interfaces
    for transfer in message.rounds[0].transfers:
        used = transfer.reduce.interface if isinstance(transfer, TreeTransfer) else 0
        shares[used] += transfer.stop - transfer.start
    total = sum(shares)
    return [share / total if total else 0.0 for share in shares]


def _summed_elements(transfer: Transfer, ranks: int) -> list[tuple[int, float]]:
    if isinstance(transfer, TreeTransfer):
        roots = [root for root in (transfer.root, transfer.second_root) if root >= 0]
        return [(root, (transfer.stop - transfer.start) / len(roots)) for root in roots]
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
    """Left: messages over the gradients in backward order, coloured by method. Right: the ranks that reduce them.

    Plans that use several network interfaces of a node also have the share of each message on each interface.
    """
    shown = shown_groups(plan, workload)
    figure = new_figure(1.5 + (0.27 if len(shown) <= _FEW else 0.18) * len(shown))
    ranks = schedule.world_size
    interfaces = 1 + max(schedule.interfaces, default=0)
    widths = [2.4, max(0.8, min(2.0, 0.14 * ranks + 0.3)), *([0.6] if interfaces > 1 else [])]
    left, right, *rest = figure.subplots(1, len(widths), sharey=True, width_ratios=widths)
    tooltips = _draw_messages(left, plan, workload, shown)
    _draw_shares(right, [reducers(schedule.messages[index], ranks) for index in shown], "% reduced by rank")
    for axes in rest:
        shares = [interface_shares(schedule.messages[index], interfaces) for index in shown]
        _draw_shares(axes, shares, "% over interface")
    figure.legend(loc="outside upper left", ncols=3, handlelength=2.2)
    methods = sorted({method_of(group) for group in plan.groups})
    if len(shown) < len(plan.groups):
        left.set_title(f"the {len(shown)} largest of {len(plan.groups)} messages")
    words = f"{counted(len(plan.groups), 'message')} over backward's order of gradients, sent by {', '.join(methods)}"
    beside = "the share that every rank reduces" + (", and that on every network interface" if rest else "")
    return Picture("messages", figure, f"{words}; beside each, {beside}.", tooltips)


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


def _draw_shares(axes: Axes, shares: Sequence[Sequence[float]], label: str) -> None:
    """Percentages [messages, columns], of which the columns are ranks or interfaces."""
    from matplotlib.colors import to_rgba

    columns = max(map(len, shares), default=1)
    cells = [(row, column, share) for row, own in enumerate(shares) for column, share in enumerate(own) if share > 0]
    if cells:
        colors = [to_rgba(BLUE, 0.12 + 0.5 * share) for _, _, share in cells]
        rows, lefts = [row for row, _, _ in cells], [column - 0.46 for _, column, _ in cells]
        axes.barh(rows, 0.92, left=lefts, height=0.76, color=colors)
    for row, column, share in cells if columns <= _MOST_RANKS_WITH_NUMBERS else ():
        axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=8, color=INK)
    axes.set_xlim(-0.6, columns - 0.4)
    step = max(1, columns // _MOST_RANKS_WITH_NUMBERS)
    axes.set_xticks(range(0, columns, step))
    axes.set_xlabel(label)
    axes.tick_params(left=False)
    axes.grid(False)
    axes.spines["left"].set_visible(False)
