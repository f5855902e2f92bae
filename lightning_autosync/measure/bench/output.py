"""The table and the figure of a bench run."""

from __future__ import annotations

import os
from typing import get_args

from matplotlib.figure import Figure
from rich.table import Table

from lightning_autosync.documents import bytes_text
from lightning_autosync.measure.bench.result import BenchResult
from lightning_autosync.measure.bench.settings import Exactness
from lightning_autosync.measure.conditions import BUSY_CORES
from lightning_autosync.measure.figures import numbers_table, save_figure

EXACT = 1e-4
"""Largest relative deviation of gradients that the order of floating-point sums explains."""
_BINDING = 4
"""Number of links in the line about the bound."""


def result_table(result: BenchResult) -> Table:
    """One row per contender, with its speedup over the best DDP, which is bold."""
    mixed, bounded = len(set(result.classes.values())) > 1, result.bound is not None
    names = ("contender", "class") if mixed else ("contender",)
    share = ("of bound",) if bounded else ()
    table = numbers_table(title(result), names, ("median ms", "min .. max", "speedup", "95% interval", *share, "sent"))
    for name in by_class(result):
        style = "bold" if name == result.best_ddp else None
        table.add_row(*_cells(result, name, mixed, bounded), style=style)
    return table


def by_class(result: BenchResult) -> list[str]:
    """The contenders, grouped by class."""
    return sorted(result.measurements, key=lambda name: get_args(Exactness).index(result.classes[name]))


def title(result: BenchResult) -> str:
    """Model, size, ranks and links in one line."""
    settings, cluster = result.settings, result.cluster
    links = f"links of {cluster.name}, {settings.rank_order} rank order"
    if settings.emulated:
        links = f"emulated {links}"
    elif settings.launch.kind == "local" and len(result.conditions["machines"]) == 1:
        links = "loopback"
    compute = ", paced compute" if result.paced else ""
    return f"{settings.model.title} ({bytes_text(result.workload.bytes)}){compute}, {cluster.world_size} ranks, {links}"


def ddp_legend(result: BenchResult) -> list[str]:
    """What the names of DDP's settings mean, in one line; no line if all arguments have their defaults."""
    options = result.settings.ddp.options()
    meanings = {
        "a number is bucket_cap_mb (MiB)": any(one.bucket_cap_mb != "default" for one in options),
        "'view' is gradient_as_bucket_view=True": any(one.gradient_as_bucket_view for one in options),
        "'static' is static_graph=True": any(one.static_graph for one in options),
    }
    found = [meaning for meaning, occurs in meanings.items() if occurs]
    return [f"in DDP's names, {', '.join(found)}; other arguments have DDP's defaults"] if found else []


def remarks(result: BenchResult) -> list[str]:
    """Conditions that a reader must know to judge the numbers."""
    settings, conditions = result.settings, result.conditions
    load = conditions["load_average_before"][0]
    lines = [
        f"{settings.rounds} interleaved rounds of {settings.steps} steps; step time: mean of the ranks; "
        f"best DDP: {result.best_ddp}",
        f"{conditions.get('scheduling_policy', 'default policy')}, "
        f"TCP {conditions.get('tcp_congestion_control', 'unknown')}, "
        f"load average {load:.1f} before, {conditions['cores']} cores: rank 0's machine, {conditions['machine']}",
        f"sent, per step and rank: {conditions['bytes_counted']}",
    ]
    if (result.foreign_cores or 0.0) > BUSY_CORES:
        lines.append(
            f"other processes or virtual machines kept {result.foreign_cores:.1f} cores busy: repeat this on an idle "
            "machine"
        )
    if result.bound is not None:
        lines.append(f"bound: {result.bound.meaning}: {result.bound.seconds * 1e3:.1f} ms")
        if result.bound.binding:
            lines.append(
                f"links that set the bound on synchronization: {', '.join(result.bound.binding_lines(_BINDING))}"
            )
    lines += ddp_legend(result)
    lines += [f"{name}: {reason}" for name, reason in result.preparation.reasons.items()]
    lines += _best_of_sparse_ddp(result)
    if not settings.long_enough:
        lines.append("too few warm-up steps, rounds or steps to support a claim")
    for name, measurement in result.measurements.items():
        if result.classes[name] == "exact" and measurement.deviation > EXACT:
            lines.append(f"{name}: gradients differ from DDP's by {measurement.deviation:.1e} of their norm")
    return lines


def _best_of_sparse_ddp(result: BenchResult) -> list[str]:
    """Compares the best exact plan with DDP with sparse gradients of embeddings, which is not among the opponents."""
    contenders = result.settings.all_contenders()
    sparse = [name for name, one in contenders.items() if one.ddp is not None and one.embeddings == "sparse"]
    if result.best_exact is None or not sparse:
        return []
    reference = min(sparse, key=lambda name: result.measurements[name].median)
    speedup = result.speedup(result.best_exact, reference)
    times = f"{speedup.median:.2f}x [{speedup.low:.2f}, {speedup.high:.2f}]"
    return [f"speedup of {result.best_exact} over {reference}, whose module has nn.Embedding(sparse=True): {times}"]


def _cells(result: BenchResult, name: str, mixed: bool, bounded: bool) -> list[str]:
    measurement, speedup = result.measurements[name], result.speedup(name)
    cells = [
        name,
        *([result.classes[name]] if mixed else []),
        f"{measurement.median * 1e3:.2f}",
        f"{min(measurement.times) * 1e3:.2f} .. {max(measurement.times) * 1e3:.2f}",
        f"{speedup.median:.3f}x",
        f"{speedup.low:.3f} .. {speedup.high:.3f}",
    ]
    if bounded:
        share = result.bound_share(name)
        cells.append("" if share is None else f"{share:.1%}")
    sent = measurement.bytes_per_step
    return [*cells, "?" if sent is None else bytes_text(sent)]


DDP_COLOUR, BEST_COLOUR, PLAN_COLOUR = "#b8bec8", "#5d6675", "#2a7fb8"


def draw(result: BenchResult, path: str | os.PathLike[str]) -> None:
    """Write the figure; the suffix of ``path`` selects PNG, SVG or PDF."""
    names = by_class(result)
    figure = Figure(figsize=(8, 1.6 + 0.32 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    positions = range(len(names))
    medians = [result.measurements[name].median * 1e3 for name in names]
    axes.barh(positions, medians, color=[_colour(result, name) for name in names])
    for position, name in enumerate(names):
        times = [seconds * 1e3 for seconds in result.measurements[name].times]
        axes.plot(times, [position] * len(times), ".", color="black", markersize=3, alpha=0.5)
        remark = "" if result.classes[name] == "exact" else f", {result.classes[name]}"
        label = f" {medians[position]:.1f} ms, {result.speedup(name).median:.2f}x{remark}"
        axes.annotate(label, (max(times), position), va="center", fontsize=8)
    if result.bound is not None:
        axes.axvline(result.bound.seconds * 1e3, color="#c0392b", linewidth=1.2, label="bound")
        axes.legend(loc="lower right", fontsize=8)
    axes.set_yticks(positions, names, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.22)
    axes.set_xlim(left=0)
    axes.set_xlabel("ms a step (median; dots are rounds), and speedup over the best DDP")
    axes.set_title(title(result), fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    save_figure(figure, path, dpi=150)


def _colour(result: BenchResult, name: str) -> str:
    if name == result.best_ddp:
        return BEST_COLOUR
    return DDP_COLOUR if result.settings.all_contenders()[name].ddp is not None else PLAN_COLOUR
