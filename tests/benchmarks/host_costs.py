"""Costs of hosts by a full probe, beside the measurement that a job makes before its first step; needs root.

    python -m tests.benchmarks.host_costs [CLUSTER ...]

`lightning_autosync.measure.probe.hosts` has its `REFERENCE` and `COSTS` from the medians of this: both among the ranks
of emulated clusters under the system's scheduling policy, by default of four and of eight ranks, in turns. Costs are in
microseconds, that of a byte in picoseconds. Takes two minutes.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lightning_autosync.cluster import resolve_cluster
from lightning_autosync.measure.emulation.launch import EmulatedLaunch
from lightning_autosync.measure.hosts import probed_hosts
from lightning_autosync.measure.probe import hosts
from lightning_autosync.measure.workers import WorkerPool

CLUSTERS = ("fat_node_star", "four_racks_of_two")
ROUNDS = 3


def job_costs() -> dict[str, Any]:
    """What a job measures; call it on every rank."""
    torch.set_num_threads(1)
    return hosts.host_constants().model_dump()


def measure(name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The costs by a job's measurement and by a probe, in each round."""
    cluster = resolve_cluster(name)
    with EmulatedLaunch(cluster) as launch, WorkerPool(cluster.world_size, launch) as pool:
        rounds = range(ROUNDS)
        found = [(pool.run(job_costs)[0], probed_hosts(pool, cluster, "none").model_dump()) for _ in rounds]
    return [own for own, _ in found], [probed for _, probed in found]


def main(*clusters: str) -> None:
    table = Table("cost", *(f"{name}, {by}" for name in clusters or CLUSTERS for by in ("job", "probe")))
    found = [costs for name in clusters or CLUSTERS for costs in measure(name)]
    for name in hosts.COSTS:
        scale = 1e12 if name == "host_cost" else 1e6
        table.add_row(name, *(f"{scale * statistics.median(each[name] for each in costs):.3g}" for costs in found))
    for name in ("copy_rate", "reduce_rate", "scan_rate"):
        table.add_row(
            f"{name}, GB/s", *(f"{statistics.median(each[name] for each in costs) / 1e9:.3g}" for costs in found)
        )
    work = [statistics.median(each["gradient_cost"] for each in costs) for costs in found[::2]]
    factors = [1e6 * hosts.REFERENCE * each / hosts.COSTS["gradient_cost"] for each in work]
    Console(width=150).print(table)
    print("small work, microseconds:", *(f"{each:.0f}" for each in factors))


if __name__ == "__main__":
    from tests.benchmarks import host_costs  # workers cannot import functions of a program

    host_costs.main(*sys.argv[1:])
