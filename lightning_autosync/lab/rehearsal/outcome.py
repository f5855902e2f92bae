"""The results of a rehearsal as a table and a figure."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from lightning_autosync.documents import Record, Result
from lightning_autosync.lab.rehearsal.contest import SamplerRun
from lightning_autosync.lab.rehearsal.settings import RehearsalSettings
from lightning_autosync.measure.figures import save_figure
from lightning_autosync.search.trial_attributes import BASELINE

NEARLY = 0.98
"""Share of the best known speed at which a plan counts as nearly the best."""
_SHOWN = (15, 50)
"""Numbers of trials after which the table shows regrets."""


class StandingSummary(Record):
    """A sampler on a pair, in the result. Tuples have an entry per run.

    Attributes:
        pair, sampler, best, builder, ratios: as in `Standing`.
        hit_rates: shares of the proposals that beat the best builder.
        trials_to_98, proposals_to_98: `Standing.trials` and `Standing.proposals`.
        regret: lower quartile, median and upper quartile of the regrets over runs, by trial.
        overhead: mean and largest number of seconds that the sampler needed for a trial.
        seeds: seeds of the runs.
    """

    pair: str
    sampler: str
    best: float
    builder: float
    ratios: tuple[float, ...]
    hit_rates: tuple[float, ...]
    trials_to_98: tuple[int | None, ...]
    proposals_to_98: tuple[int | None, ...]
    regret: dict[str, tuple[float, ...]]
    overhead: dict[str, float]
    seeds: tuple[int, ...]


class RehearsalResult(Result):
    """The standings of all samplers.

    Attributes:
        emulated: whether links and computation are emulated, and whether times are replayed.
        standings: a summary for each pair and sampler.
    """

    FORMAT: ClassVar[str] = "autosync-rehearsal/1"

    settings: RehearsalSettings
    emulated: dict[str, bool]
    standings: tuple[StandingSummary, ...]

    def figures(self) -> dict[str, str]:
        samplers = dict.fromkeys(one.sampler for one in self.standings)
        ratios = {
            name: [ratio for one in self.standings if one.sampler == name for ratio in one.ratios] for name in samplers
        }
        return {f"{name}: speedup over best builder": f"{statistics.median(ratios[name]):.3f}x" for name in samplers}


@dataclass(frozen=True)
class Standing:
    """The results of a sampler on a pair over its runs.

    Attributes:
        best: step time in seconds of the fastest plan known on the pair, from any run.
        builder: step time in seconds of the best builder's plan.
    """

    pair: str
    sampler: str
    best: float
    builder: float
    runs: Sequence[SamplerRun]

    @property
    def regrets(self) -> numpy.ndarray[Any, Any]:
        """[runs, trials] relative slowdown of the incumbent compared with the best known plan."""
        return numpy.array([run.incumbents for run in self.runs]) / self.best - 1

    @property
    def ratios(self) -> list[float]:
        """For each run, the speedup of the plan found over the best builder's plan."""
        return [self.builder / float(run.incumbents[-1]) for run in self.runs]

    @property
    def trials(self) -> list[int | None]:
        """For each run, the number of trials until a plan was nearly the best; None if none was."""
        return [_first(run.incumbents <= self.best / NEARLY) for run in self.runs]

    @property
    def proposals(self) -> list[int | None]:
        """The same as `trials`, without builders' plans."""
        counts = []
        for run, trials in zip(self.runs, self.trials, strict=True):
            built = run.origins[:trials].count(BASELINE) if trials is not None else 0
            counts.append(None if trials is None else trials - built)
        return counts

    def summary(self) -> StandingSummary:
        overhead = [seconds for run in self.runs for seconds in run.overhead]
        regrets = self.regrets
        return StandingSummary(
            pair=self.pair,
            sampler=self.sampler,
            best=self.best,
            builder=self.builder,
            ratios=tuple(self.ratios),
            hit_rates=tuple(run.hit_rate for run in self.runs),
            trials_to_98=tuple(self.trials),
            proposals_to_98=tuple(self.proposals),
            regret={
                name: tuple(numpy.quantile(regrets, share, axis=0).tolist())
                for name, share in (("low", 0.25), ("median", 0.5), ("high", 0.75))
            },
            overhead={"mean": statistics.fmean(overhead), "most": max(overhead)},
            seeds=tuple(run.seed for run in self.runs),
        )


def standings(runs: Iterable[SamplerRun]) -> list[Standing]:
    """A standing for each pair and sampler, in the order of the runs."""
    everything = list(runs)
    made = []
    for pair in dict.fromkeys(run.pair for run in everything):
        here = [run for run in everything if run.pair == pair]
        best = min(min(run.best, *run.seconds) for run in here)
        for sampler in dict.fromkeys(run.sampler for run in here):
            own = [run for run in here if run.sampler == sampler]
            made.append(Standing(pair, sampler, best, here[0].builder, own))
    return made


def table(found: Sequence[Standing]) -> Table:
    """One row per standing, with medians over runs."""
    afters = [f"regret {count}" for count in _SHOWN]
    names = ("pair", "sampler", "runs", "speedup over builder", "least", *afters, "regret end", "proposals to 98%")
    made = Table(*names, "hit rate", "s/proposal")
    for one in found:
        regrets = numpy.median(one.regrets, axis=0)
        made.add_row(
            one.pair,
            one.sampler,
            str(len(one.runs)),
            f"{statistics.median(one.ratios):.3f}x",
            f"{min(one.ratios):.3f}x",
            *(f"{regrets[min(count, len(regrets)) - 1]:.1%}" for count in _SHOWN),
            f"{regrets[-1]:.1%}",
            _median_count(one.proposals),
            f"{statistics.median(run.hit_rate for run in one.runs):.0%}",
            f"{statistics.fmean(seconds for run in one.runs for seconds in run.overhead):.3f}",
        )
    return made


def _median_count(counts: Sequence[int | None]) -> str:
    ordered = sorted(counts, key=lambda count: (count is None, count or 0))
    middle = ordered[(len(ordered) - 1) // 2]
    reached = sum(count is not None for count in counts)
    return f"{middle if middle is not None else '-'} ({reached}/{len(counts)})"


def _first(hits: numpy.ndarray[Any, Any]) -> int | None:
    return int(numpy.argmax(hits)) + 1 if hits.any() else None


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
"""Least regret on the logarithmic axis."""


def draw(found: Sequence[Standing], path: str | os.PathLike[str]) -> None:
    """Write the figure; the suffix of ``path`` selects PNG, SVG or PDF."""
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
