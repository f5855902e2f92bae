"""A picture of a hybrid plan: the ranks in the mesh, and the signature of each layer along each dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import short_labels
from lightning_autosync.hybrid.describe import alike_layers
from lightning_autosync.hybrid.plan import HybridPlan, LayerPlan, Signature
from lightning_autosync.report.figures.picture import (
    BLUE,
    GREEN,
    GREY,
    INK,
    MARKERS,
    MUTED,
    ORANGE,
    PAPER,
    PURPLE,
    SERIES,
    Picture,
    new_figure,
    styled,
)
from lightning_autosync.search.hybrid.result import HybridTrial

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS: dict[Signature, str] = {"dp": BLUE, "col": ORANGE, "row": GREEN, "heads": PURPLE, "rep": GREY}
WORDS: dict[Signature, str] = {
    "dp": "dp: own samples",
    "col": "col: own output features",
    "row": "row: own input features",
    "heads": "heads: own heads",
    "rep": "rep: all of it",
}
_MOST_RANKS = 64
_MOST_LAYERS = 40
_MOST_CHARACTERS = 34


@styled
def mesh_picture(plan: HybridPlan, cluster: ClusterSpec | None) -> Picture:
    """Left: the ranks at their places in the mesh, coloured by node. Right: the layers, coloured by signature."""
    layers = alike_layers(plan.layers)
    rows = layers[:_MOST_LAYERS]
    figure = new_figure(max(2.2, 1.1 + 0.3 * len(rows)))
    left, right = figure.subplots(1, 2, width_ratios=[1.0, 1.4 + 0.3 * len(plan.mesh)])
    if plan.world_size <= _MOST_RANKS:
        _draw_ranks(left, plan, cluster)
    else:
        left.text(0.5, 0.5, f"{plan.world_size} ranks", ha="center", va="center", color=MUTED)
        left.set_axis_off()
    _draw_layers(right, plan, rows)
    right.set_title("layers" if rows == layers else f"the first {len(rows)} of {len(layers)} rows of layers")
    shape = " x ".join(map(str, plan.mesh))
    names = sorted({name for layer in plan.layers for name in layer.signature})
    words = f"A mesh of {shape} ranks, and how {len(plan.layers)} layers are split: {', '.join(names)}."
    return Picture("mesh", figure, words)


def _draw_ranks(axes: Axes, plan: HybridPlan, cluster: ClusterSpec | None) -> None:
    """Draw the ranks: the last dimension runs to the right, all other dimensions together run downwards."""
    places = plan.rank_array.reshape(-1, plan.mesh[-1])
    for (row, column), rank in numpy.ndenumerate(places):
        node = 0 if cluster is None else cluster.rank_nodes[int(rank)]
        axes.add_patch(_box(column, row, SERIES[node % len(SERIES)]))
        axes.text(column, row, f"{rank}", ha="center", va="center", color=INK)
    axes.set_xlim(-0.6, places.shape[1] - 0.4)
    axes.set_ylim(places.shape[0] - 0.4, -0.6)
    axes.set_aspect("equal")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(False)
    axes.set_xlabel(f"dimension {len(plan.mesh) - 1} ({plan.mesh[-1]})")
    others = [f"{dimension} ({size})" for dimension, size in enumerate(plan.mesh[:-1])]
    axes.set_ylabel(f"dimension {', '.join(others)}" if others else "")
    axes.set_title("ranks" + ("" if cluster is None else ", a colour a node"))
    for spine in axes.spines.values():
        spine.set_visible(False)


def _box(column: int, row: int, colour: str):  # type: ignore[no-untyped-def]  # matplotlib is imported late
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.45, row - 0.45), 0.9, 0.9, facecolor=colour, alpha=0.3, edgecolor=PAPER)


def _draw_layers(axes: Axes, plan: HybridPlan, rows: Sequence[tuple[str, LayerPlan]]) -> None:
    shown: set[Signature] = set()
    for row, (_, layer) in enumerate(rows):
        for dimension, name in enumerate(layer.signature):
            label = WORDS[name] if name not in shown else "_"
            shown.add(name)
            axes.barh(row, 0.94, left=dimension - 0.47, height=0.84, color=COLOURS[name], alpha=0.55, label=label)
            output = "" if layer.output is None else f" > {layer.output[dimension]}"
            axes.text(dimension, row, f"{name}{output}", ha="center", va="center", fontsize=8, color=INK)
    axes.set_yticks(range(len(rows)), short_labels([paths or "(root)" for paths, _ in rows], _MOST_CHARACTERS))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(len(plan.mesh)), [f"dimension {k} ({size})" for k, size in enumerate(plan.mesh)])
    axes.set_xlim(-0.5, len(plan.mesh) - 0.5)
    axes.tick_params(length=0)
    axes.grid(False)
    axes.figure.legend(loc="outside lower center", ncols=3)


@styled
def predictions_picture(trials: Sequence[HybridTrial]) -> Picture | None:
    """Measured over predicted seconds of a step; None if fewer than two plans have both."""
    known = [trial for trial in trials if trial.seconds is not None and trial.predicted is not None]
    if len(known) < 2:
        return None
    figure = new_figure(3.6, 6.0)
    axes = figure.subplots()
    tooltips = {}
    for number, origin in enumerate(dict.fromkeys(trial.origin for trial in known)):
        some = [trial for trial in known if trial.origin == origin]
        marks = axes.scatter(
            [1e3 * (trial.predicted or 0) for trial in some],
            [1e3 * (trial.seconds or 0) for trial in some],
            *(30, SERIES[number]),
            marker=MARKERS[number],
            label=origin,
            gid=f"predicted-{origin}",
        )
        tooltips[str(marks.get_gid())] = [
            f"{trial.name}: {1e3 * (trial.seconds or 0):.1f} ms, predicted {1e3 * (trial.predicted or 0):.1f} ms"
            for trial in some
        ]
    both = [1e3 * value for trial in known for value in (trial.seconds or 0, trial.predicted or 0)]
    ends = [0.8 * min(both), 1.25 * max(both)]
    axes.plot(ends, ends, color=MUTED, linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    axes.set_xlabel("predicted ms a step")
    axes.set_ylabel("measured ms a step")
    axes.legend()
    return Picture("predictions", figure, "Measured times of a step over predicted ones, a mark a plan.", tooltips)
