"""The table that a bench run prints."""

from __future__ import annotations

from rich.table import Table

from lightning_autosync.bench.result import Result

BUSY = 0.1
"""Cores used by others from which on a run is not worth much."""
EXACT = 1e-4
"""Gradient deviation up to which only the order of floating-point sums differs."""


def result_table(result: Result) -> Table:
    """One row a contender; the best DDP stands out."""
    table = Table(title=title(result))
    table.add_column("contender", no_wrap=True)
    for heading in ("median ms", "min .. max", "x best DDP", "95% interval"):
        table.add_column(heading, justify="right", no_wrap=True)
    bounded = result.bound_share(result.best_ddp) is not None
    if bounded:
        table.add_column("of the bound", justify="right")
    table.add_column("MB sent", justify="right")
    for name in result.measurements:
        style = "bold" if name == result.best_ddp else None
        table.add_row(*_cells(result, name, bounded), style=style)
    return table


def title(result: Result) -> str:
    """Model, size, ranks and links in one line."""
    settings, cluster = result.settings, result.cluster
    links = "loopback"
    if settings.launch == "emulated":
        links = f"emulated links of {cluster.name}, {settings.rank_order} rank order"
    return f"{settings.model.kind} ({result.size / 1e6:.1f} MB), {cluster.world_size} ranks, {links}"


def remarks(result: Result) -> list[str]:
    """What a reader must know to judge the numbers."""
    settings, conditions = result.settings, result.conditions
    load = conditions["load_average_before"][0]
    lines = [
        f"{settings.rounds} interleaved rounds of {settings.steps} steps; step time of the slowest rank; "
        f"best DDP: {result.best_ddp}",
        f"{conditions.get('scheduling_policy', 'default policy')}, "
        f"TCP {conditions.get('tcp_congestion_control', 'unknown')}, "
        f"load average {load:.1f} before",
        f"MB sent, per step and rank: {conditions['bytes_counted']}",
    ]
    if (result.foreign_cores or 0.0) > BUSY:
        lines.append(f"other processes kept {result.foreign_cores:.1f} cores busy meanwhile: repeat when it is quiet")
    if result.bound is not None:
        lines.append(f"bound on synchronization alone, framing included: {result.bound * 1e3:.1f} ms")
    if not settings.meets_protocol:
        lines.append("too few warm-up steps, rounds or steps to back a claim")
    for name, measurement in result.measurements.items():
        if measurement.deviation > EXACT:
            lines.append(f"{name}: gradients differ from DDP's by {measurement.deviation:.1e} of their length")
    return lines


def _cells(result: Result, name: str, bounded: bool) -> list[str]:
    measurement, ratio = result.measurements[name], result.ratio(name)
    cells = [
        name,
        f"{measurement.median * 1e3:.2f}",
        f"{min(measurement.times) * 1e3:.2f} .. {max(measurement.times) * 1e3:.2f}",
        f"{ratio.median:.3f}",
        f"{ratio.low:.3f} .. {ratio.high:.3f}",
    ]
    if bounded:
        cells.append(f"{result.bound_share(name):.1%}")
    sent = measurement.bytes_per_step
    return [*cells, "?" if sent is None else f"{sent / 1e6:.3f}"]
