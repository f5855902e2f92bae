"""The picture of a rehearsal: for each pair the regret of every run over trials, and the hit rates."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_autosync.lab.rehearsal.outcome import Standing
from lightning_autosync.measure.figures import save_figure

COLOURS = {
    "autosync": "#2a7fb8",
    "transfer": "#1b9e77",
    "random": "#b8bec8",
    "tpe": "#e6a23c",
    "gp": "#8e5ea2",
    "horovod": "#c0392b",
    "oracle": "#5d6675",
}
_LEAST = 1e-3
"""Regret below which the logarithmic axis ends."""


def draw(found: Sequence[Standing], path: str | os.PathLike[str]) -> None:
    """Write the picture; the ending of ``path`` says whether PNG, SVG or PDF."""
    pairs = list(dict.fromkeys(one.pair for one in found))
    figure = Figure(figsize=(5 * min(3, len(pairs)), 3.4 * -(-len(pairs) // 3) + 2.4), layout="constrained")
    grid = figure.add_gridspec(-(-len(pairs) // 3) + 1, min(3, len(pairs)))
    for number, pair in enumerate(pairs):
        axes = figure.add_subplot(grid[number // 3, number % 3])
        _draw_pair(axes, [one for one in found if one.pair == pair])
        axes.set_title(pair, fontsize=9)
        if number == 0:
            axes.legend(fontsize=7)
    _draw_hits(figure.add_subplot(grid[-1, :]), found, pairs)
    save_figure(figure, path, dpi=130)


def _draw_pair(axes: Axes, found: Sequence[Standing]) -> None:
    for one in found:
        colour = COLOURS[one.sampler]
        regrets = numpy.maximum(one.regrets, _LEAST)
        trials = numpy.arange(1, regrets.shape[1] + 1)
        axes.plot(trials, regrets.T, color=colour, alpha=0.2, linewidth=0.5)
        axes.plot(trials, numpy.median(regrets, axis=0), color=colour, linewidth=1.6, label=one.sampler)
    axes.axhline(found[0].builder / found[0].best - 1, color="black", linestyle=":", linewidth=1)
    axes.set_yscale("log")
    axes.set_xlabel("trials (dotted: best builder)", fontsize=8)
    axes.set_ylabel("slower than the best known", fontsize=8)
    axes.tick_params(labelsize=7)


def _draw_hits(axes: Axes, found: Sequence[Standing], pairs: Sequence[str]) -> None:
    samplers = list(dict.fromkeys(one.sampler for one in found))
    width = 0.8 / len(samplers)
    for one in found:
        place = pairs.index(one.pair) + (samplers.index(one.sampler) - (len(samplers) - 1) / 2) * width
        rates = [run.hit_rate for run in one.runs]
        axes.bar(place, float(numpy.median(rates)), width, color=COLOURS[one.sampler])
        axes.plot([place] * len(rates), rates, ".", color="black", markersize=2)
    axes.set_xticks(range(len(pairs)), pairs, fontsize=8)
    axes.set_ylabel("share of proposals\nfaster than the best builder", fontsize=8)
    axes.tick_params(axis="y", labelsize=7)
