"""Steps with native all-reduces under DDP and under the engine, in the same buckets; needs root.

    python -m tests.benchmarks.native_steps [RANKS] [GBIT] [ROUNDS] [STEPS]

Ranks behind one emulated switch train the model of `busy_cores`. The contenders take turns (A B B A) in the same
processes: DDP with three sizes of buckets, with and without views and a static graph, the engine with the same buckets,
and ``alone``, which synchronizes nothing. The table has, as medians of the rounds: milliseconds of a step (of the
slowest rank), and of the CPU time that a rank takes for it (mean of the ranks) with all its threads and with its main
thread; and the fastest DDP's figure divided by this one's, for steps and for the CPU time of all threads. CPU time
depends little on other load.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.measure.bench.settings import DDPOptions
from lightning_autosync.measure.emulation.launch import EmulatedLaunch
from lightning_autosync.measure.models.recipes import model_of
from lightning_autosync.measure.replicas import DDPReplica, PlanReplica, Replica, Training
from lightning_autosync.measure.workers import WorkerPool
from lightning_autosync.plan.builders import all_reduce
from lightning_autosync.workload import describe
from tests.benchmarks.busy_cores import GBIT, MODEL

MIB = 2**20
BUCKETS = ("default", 1, 100)
WARM_UP = 8
_live: dict[str, Replica] = {}


class Alone(Replica):
    """Each rank trains a model of its own."""

    @property
    def synchronized(self) -> nn.Module:
        return self.module


def set_up(name: str, cluster: dict[str, Any], bucket: Any = None, views: bool = False, static: bool = False) -> None:
    described = ClusterSpec.from_dict(cluster)
    training = Training.of(model_of(MODEL), False, described)
    if name.startswith("DDP"):
        options = DDPOptions(bucket_cap_mb=bucket, gradient_as_bucket_view=views, static_graph=static)
        _live[name] = DDPReplica(training, options, described)
    elif bucket is not None:
        workload = describe(training.module)
        size = {} if bucket == "default" else {"bucket_bytes": bucket * MIB, "first_bucket_bytes": bucket * MIB}
        plan = all_reduce(workload, described, **size)
        _live[name] = PlanReplica(training, plan, workload, described, timeout=60.0, views=views)
    else:
        _live[name] = Alone(training)
    _live[name].run(WARM_UP)


def turn(name: str, steps: int) -> tuple[float, float, float]:
    """Milliseconds of this rank's median step, and of CPU time of all threads and of this one for a step."""
    clocks: list[Callable[[], float]] = [time.process_time, time.thread_time]
    begun = [clock() for clock in clocks]
    times = _live[name].run(steps)
    every, main = (clock() - start for clock, start in zip(clocks, begun, strict=True))
    return 1e3 * statistics.median(times), 1e3 * every / steps, 1e3 * main / steps


def measure(ranks: int, gbit: float, rounds: int, steps: int) -> dict[str, list[tuple[float, float, float]]]:
    """By contender and round: the step of the slowest rank, and the mean CPU times."""
    cluster = ClusterSpec.uniform(nodes=ranks, bandwidth=gbit * GBIT, latency=50e-6, name=f"{gbit:g} Gbit/s")
    contenders: dict[str, dict[str, Any]] = {"alone": {}}
    for bucket in BUCKETS:
        for views in (True, False):
            named = f"{bucket}{', views' * views}"
            contenders[f"DDP {named}"] = {"bucket": bucket, "views": views}
            contenders[f"engine {named}"] = {"bucket": bucket, "views": views}
        contenders[f"DDP {bucket}, views, static"] = {"bucket": bucket, "views": True, "static": True}
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in contenders}
    with EmulatedLaunch(cluster) as launch, WorkerPool(ranks, launch, scheduling="batch") as pool:
        for name, options in contenders.items():
            pool.run(set_up, name=name, cluster=cluster.to_dict(), **options)
        for number in range(rounds):
            for name in contenders if number % 2 == 0 else reversed(contenders):
                step, every, main = zip(*pool.run(turn, name=name, steps=steps), strict=True)
                found[name].append((max(step), statistics.fmean(every), statistics.fmean(main)))
    return found


def main(ranks: str = "2", gbit: str = "8", rounds: str = "9", steps: str = "10") -> None:
    found = measure(int(ranks), float(gbit), int(rounds), int(steps))
    best = min(
        (name for name in found if name.startswith("DDP")),
        key=lambda name: statistics.median(step for step, _, _ in found[name]),
    )
    table = Table("contender", "step", "range", "best DDP's / this", "CPU", "range", "best DDP's / this", "main thread")
    for name, values in found.items():
        row = [name]
        for place in (0, 1):
            column, opponent = ([each[place] for each in one] for one in (values, found[best]))
            ratio = statistics.median(theirs / own for theirs, own in zip(opponent, column, strict=True))
            row += [f"{statistics.median(column):.2f}", f"{min(column):.1f} to {max(column):.1f}", f"{ratio:.3f}"]
        table.add_row(*row, f"{statistics.median(each[2] for each in values):.2f}")
    print(f"{ranks} ranks, {gbit} Gbit/s, {rounds} rounds of {steps} steps; load {os.getloadavg()[0]:.1f}; {best}")
    Console(width=120).print(table)


if __name__ == "__main__":
    from tests.benchmarks import native_steps  # workers cannot import functions of a program

    native_steps.main(*sys.argv[1:])
