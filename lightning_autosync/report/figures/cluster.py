"""A picture of a cluster, with the traffic of a step on each direction of each link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_autosync.cluster import ClusterSpec, Link
from lightning_autosync.documents import bytes_text
from lightning_autosync.report.figures.picture import BLUE, GREY, INK, PAPER, RED, Picture, new_figure, styled
from lightning_autosync.report.rendering import rate_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_NODES = 32
"""Largest number of nodes that a picture has room for."""
_FULL = 0.9
"""Busy share from which a link counts as full."""


@dataclass(frozen=True)
class Traffic:
    """The traffic of one step on the links.

    Attributes:
        step_time: seconds of the step.
        busy: busy share of the step for each direction of a link, by its name ``a > b``.
    """

    step_time: float
    busy: Mapping[str, float]

    def label(self, source: str, target: str, rate: float) -> str:
        """``12.3 MB, 95%``: bytes on the wire in a step, and the busy share."""
        share = self.busy.get(f"{source} > {target}", 0.0)
        return f"{bytes_text(share * rate * self.step_time)}, {share:.0%}"

    def width(self, source: str, target: str) -> float:
        """Width of the link's line in points."""
        return 0.8 + 4.2 * self.busy.get(f"{source} > {target}", 0.0)

    def color(self, source: str, target: str) -> str:
        return RED if self.busy.get(f"{source} > {target}", 0.0) >= _FULL else BLUE


@styled
def cluster_picture(cluster: ClusterSpec, traffic: Traffic) -> Picture | None:
    """Nodes with their ranks, switches, and links with their traffic; None for clusters too large to draw.

    Links without cycles are drawn as a tree from left to right, others as a graph. If the nodes have several network
    interfaces, there is a tree for each of these.
    """
    import networkx

    if len(cluster.nodes) > MOST_NODES or not cluster.measured:
        return None
    networks = [cluster.over(interface) for interface in range(cluster.interface_count)]
    apart = sum(len(network.links) for network in networks) == len(cluster.links)
    if apart and all(networkx.is_tree(_graph_of(network)) for network in networks):
        figure = _draw_trees(networks, traffic)
    else:
        figure = _draw_graph(cluster, _graph_of(cluster), traffic)
    full = [name for name, share in traffic.busy.items() if share >= _FULL]
    words = f"{len(cluster.nodes)} nodes, {len(cluster.switches)} switches and {len(cluster.links)} links of cluster "
    words += f"{cluster.name}, with the bytes that a step sends over each direction of each link. "
    words += f"Busy for at least {_FULL:.0%} of the step: {', '.join(full) or 'none'}."
    return Picture("cluster", figure, words)


def _graph_of(cluster: ClusterSpec) -> Any:
    import networkx

    graph = networkx.Graph()
    graph.add_nodes_from([node.name for node in cluster.nodes])
    graph.add_edges_from((link.a, link.b, {"link": link}) for link in cluster.links)
    return graph


def _ranks(cluster: ClusterSpec, name: str) -> str:
    index = next((number for number, node in enumerate(cluster.nodes) if node.name == name), None)
    if index is None:
        return ""
    ranks = cluster.ranks_of(index)
    many = len(ranks) > 4 and ranks == tuple(range(ranks[0], ranks[-1] + 1))
    listed = f"{ranks[0]} to {ranks[-1]}" if many else ", ".join(map(str, ranks))
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


@dataclass
class _Box:
    """A box in the tree: its column, and the rows that it spans."""

    column: int
    top: float
    bottom: float

    @property
    def middle(self) -> float:
        return (self.top + self.bottom) / 2


def _draw_trees(networks: Sequence[ClusterSpec], traffic: Traffic) -> Any:
    """One tree below the other, with the number of the interface if there are several."""
    heights = [0.5 + 0.62 * len(network.nodes) for network in networks]
    figure = new_figure(sum(heights))
    panels = figure.subplots(len(networks), 1, height_ratios=heights, squeeze=False)[:, 0]
    for number, (network, axes) in enumerate(zip(networks, panels, strict=True)):
        _draw_tree(axes, network, traffic)
        if len(networks) > 1:
            axes.set_title(f"interface {number}", loc="left")
    return figure


def _draw_tree(axes: Axes, cluster: ClusterSpec, traffic: Traffic) -> None:
    import networkx

    graph = _graph_of(cluster)
    # The root is a switch in the centre of the tree, if there is one; of several, the one with most links.
    middle = networkx.center(graph)
    root = max(middle, key=lambda name: (name in cluster.switches, graph.degree(name), name))
    boxes: dict[str, _Box] = {}
    rows = _place(graph, root, None, 0, 0, boxes)
    depth = max(box.column for box in boxes.values())
    for parent, child in networkx.bfs_edges(graph, root):
        _draw_branch(axes, cluster, boxes, graph.edges[parent, child]["link"], (parent, child), traffic)
    for name, box in boxes.items():
        _draw_box(axes, cluster, name, box)
    axes.set_xlim(-0.1, depth + 0.5)
    axes.set_ylim(rows - 0.4, -0.6)
    axes.axis("off")


def _place(graph: Any, name: str, parent: str | None, column: int, row: int, boxes: dict[str, _Box]) -> int:
    """Place ``name`` and its subtree, starting at ``row``; returns the first free row."""
    children = [child for child in graph.neighbors(name) if child != parent]
    free = row
    for child in children:
        free = _place(graph, child, name, column + 1, free, boxes)
    free = max(free, row + 1)
    boxes[name] = _Box(column, row, free - 1)
    return free


_BOX, _SWITCH = 0.4, 0.09
"""Widths of a node's and of a switch's box, in columns."""


def _draw_box(axes: Axes, cluster: ClusterSpec, name: str, box: _Box) -> None:
    from matplotlib.patches import FancyBboxPatch

    switch = name in cluster.switches
    width, height = (_SWITCH if switch else _BOX), box.bottom - box.top + 0.72
    outline = FancyBboxPatch(
        (box.column, box.top - 0.36),
        width,
        height,
        boxstyle="round,pad=0,rounding_size=0.05",
        mutation_aspect=4,
        facecolor=GREY if switch else PAPER,
        edgecolor=GREY if switch else INK,
        linewidth=1.2,
        zorder=3,
    )
    axes.add_patch(outline)
    middle = box.column + width / 2
    if switch:
        axes.text(middle, box.middle, name, color=PAPER, ha="center", va="center", rotation=90, fontsize=9, zorder=4)
        return
    axes.text(middle, box.middle - 0.12, name, ha="center", va="center", fontsize=9, fontweight="bold", zorder=4)
    axes.text(middle, box.middle + 0.16, _ranks(cluster, name), ha="center", va="center", fontsize=8, zorder=4)


def _draw_branch(
    axes: Axes, cluster: ClusterSpec, boxes: Mapping[str, _Box], link: Link, ends: tuple[str, str], traffic: Traffic
) -> None:
    """Draw two arrows between the boxes of a parent and its child: downstream above, upstream below."""
    parent, child = ends
    start = boxes[parent].column + (_SWITCH if parent in cluster.switches else _BOX)
    end, row = boxes[child].column, boxes[child].middle
    for source, target, rate in link.directions:
        side, begin, stop = (-1, start, end) if source == parent else (1, end, start)
        width, color = traffic.width(source, target), traffic.color(source, target)
        _arrow(axes, (begin, row + 0.06 * side), (stop, row + 0.06 * side), width, color)
        text = f"{traffic.label(source, target, rate)} of {rate_text(rate)}"
        beside: dict[str, Any] = {"ha": "center", "va": "bottom" if side < 0 else "top", "fontsize": 8.5, "zorder": 4}
        axes.text((start + end) / 2, row + 0.12 * side, text, **beside)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], width: float, color: str) -> None:
    head = f"-|>,head_length={0.35 + 0.02 * width},head_width={0.14 + 0.06 * width}"
    look = {"arrowstyle": head, "linewidth": width, "color": color, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=look, zorder=2)


def _draw_graph(cluster: ClusterSpec, graph: Any, traffic: Traffic) -> Any:
    import networkx

    places = networkx.circular_layout(graph) if len(graph) <= 8 else networkx.kamada_kawai_layout(graph)
    figure = new_figure(5.0)
    axes = figure.add_subplot()
    for link in cluster.links:
        a, b = places[link.a], places[link.b]
        colors = traffic.color(link.a, link.b), traffic.color(link.b, link.a)
        width = max(traffic.width(link.a, link.b), traffic.width(link.b, link.a))
        axes.plot([a[0], b[0]], [a[1], b[1]], color=RED if RED in colors else BLUE, linewidth=width, zorder=1)
        text = "\n".join(
            f"{source} > {target}: {traffic.label(source, target, rate)} of {rate_text(rate)}"
            for source, target, rate in link.directions
        )
        box = {"boxstyle": "round,pad=0.25", "facecolor": PAPER, "edgecolor": "none", "alpha": 0.9}
        x, y = (a + b) / 2
        axes.text(x, y, text, ha="center", va="center", fontsize=8.5, bbox=box)
    for name, (x, y) in places.items():
        switch = name in cluster.switches
        box = {
            "boxstyle": "round,pad=0.5",
            "facecolor": GREY if switch else PAPER,
            "edgecolor": GREY if switch else INK,
            "linewidth": 1.2,
        }
        text = name if switch else f"{name}\n{_ranks(cluster, name)}"
        look: dict[str, Any] = {"ha": "center", "va": "center", "multialignment": "center", "fontsize": 9, "zorder": 5}
        axes.text(x, y, text, color=PAPER if switch else INK, bbox=box, **look)
    axes.margins(0.1)
    axes.set_axis_off()
    return figure
