"""Packed trees over one and over two network interfaces on emulated links; needs root, takes a minute.

    python -m tests.benchmarks.interfaces [MBIT [MIB ...]]

The cluster is ``two_interfaces`` with links of MBIT Mbit/s (200 by default); a step synchronizes one vector of MIB MiB
(8 and 32), without computation. All plans take turns in the same live processes: packed trees over both interfaces, the
same without the trees over the second one, and native all-reduces. The table has the median step times, the speedup of
both interfaces over each plan (median and range over rounds), the shares of the bound, what the replay predicts for
frames and as a fluid, and the cores that other processes kept busy.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, field
from itertools import islice

from rich.console import Console
from rich.table import Table

from lightning_autosync.cluster import ClusterSpec, resolve_cluster
from lightning_autosync.measure.hosts import emulated_hosts, least_step
from lightning_autosync.measure.interleaving import alternating_rounds
from lightning_autosync.measure.launches.settings import LaunchSettings
from lightning_autosync.measure.session import Contender, MeasurementSession
from lightning_autosync.measure.step_time import step_time
from lightning_autosync.plan import SyncPlan, builders, compile_plan
from lightning_autosync.replay import Replay
from lightning_autosync.workload import Workload
from tests.benchmarks.bound_shares import prepared

WARM_UP, ROUNDS, STEPS = 2, 7, 2


@dataclass
class Measured:
    """One plan; by round the seconds of a step, and the cores that other processes kept busy."""

    contender: Contender
    predicted: dict[str, float]
    times: list[float] = field(default_factory=list)
    foreign: list[float] = field(default_factory=list)


def plans(workload: Workload, cluster: ClusterSpec) -> dict[str, SyncPlan]:
    both = builders.packed_trees(workload, cluster)
    data = both.to_dict()
    for group in data["groups"]:
        group["trees"] = [tree for tree in group["trees"] if "interface" not in tree]
    return {"both": both, "first": SyncPlan.from_dict(data), "native": builders.all_reduce(workload, cluster)}


def measure(cluster: ClusterSpec, mib: float) -> tuple[float, dict[str, Measured]]:
    """Seconds of the bound, and what was measured of each plan."""
    preparation = prepared(cluster, "natural", mib)
    workload, order = preparation.workload, preparation.orders["autosync"]
    replay = Replay(workload, cluster, emulated_hosts())
    found = {}
    for name, plan in plans(workload, cluster).items():
        schedule = compile_plan(plan, workload, cluster)
        seconds = {detail: replay.predict(schedule, detail).step_time for detail in ("frames", "fluid")}
        found[name] = Measured(Contender(name, {**order, "plan": plan.to_dict()}), seconds)
    with MeasurementSession(cluster, LaunchSettings(kind="emulated"), timeout=120.0) as session:
        for one in found.values():
            session.measure(one.contender, WARM_UP)
        for turns in islice(alternating_rounds(lambda: list(found.values())), ROUNDS):
            for one in turns:
                load = session.watch_load()
                one.times.append(step_time(session.measure(one.contender, STEPS)))
                one.foreign.append(load.foreign_cores() or 0.0)
    return least_step(workload, cluster).seconds, found


def main(rate: str = "200", *sizes: str) -> None:
    cluster = resolve_cluster("two_interfaces").scaled(float(rate) / 1000).as_emulated()
    headings = ("MiB", "plan", "median ms", "of bound", "both is faster by", "frames", "fluid", "busy cores")
    table = Table(*headings, title=f"links of {rate} Mbit/s; {ROUNDS} rounds of {STEPS} steps")
    for mib in [float(size) for size in sizes] or (8.0, 32.0):
        bound, found = measure(cluster, mib)
        for name, one in found.items():
            median = statistics.median(one.times)
            gains = sorted(own / both for own, both in zip(one.times, found["both"].times, strict=True))
            row = [f"{mib:g}", name, f"{1e3 * median:.1f}", f"{bound / median:.1%}"]
            row += [f"{statistics.median(gains):.2f}x ({gains[0]:.2f} .. {gains[-1]:.2f})"]
            row += [f"{one.predicted[detail] / median - 1:+.1%}" for detail in ("frames", "fluid")]
            table.add_row(*row, f"{statistics.mean(one.foreign):.2f}")
    Console(width=150).print(table)


if __name__ == "__main__":
    main(*sys.argv[1:])
