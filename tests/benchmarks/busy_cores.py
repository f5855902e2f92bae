"""The default beside best-tuned DDP where real computation keeps all cores busy; needs root and an idle machine.

    python -m tests.benchmarks.busy_cores [GBIT ...]

Takes 8 minutes. Two and four ranks behind one switch train a model with real computation; links are emulated, by
default of 0.2, 1 and 8 Gbit/s. ``default`` is the plan of `AutoSyncStrategy(tuning="off")`; ``searched`` is the plan
with which a job begins that tunes itself, predicted with the costs of these hosts. All gradients are views of buffers,
also those of DDP. A speedup is the best DDP's time divided by a plan's, the median of the rounds' ratios with its
interval. The goal is a speedup of at least 0.98 everywhere.
"""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.measure.bench.result import BenchResult
from lightning_autosync.measure.bench.run import run_bench
from lightning_autosync.measure.bench.settings import BenchSettings
from lightning_autosync.measure.conditions import usable_cores
from lightning_autosync.measure.hosts import measured_hosts
from lightning_autosync.measure.workers import WorkerPool
from lightning_autosync.plan import SyncPlan
from lightning_autosync.replay import Constants
from lightning_autosync.strategy.tuning.proposals import DESCRIBED, JobLinks, order_plans, search_plans
from lightning_autosync.strategy.tuning.settings import TuningSettings
from lightning_autosync.workload import Workload

GBIT = 1e9 / 8
RATES = (0.2, 1.0, 8.0)
RANKS = (2, 4)
SEARCH = 5.0
"""Seconds that a job searches."""
MODEL = {"kind": "layers", "tensors": 60, "width": 192, "batch": 192}
"""30 residual linear layers, 4.5 MB."""
DDP = {"bucket_cap_mb": ["default", 1, 100], "gradient_as_bucket_view": [True], "static_graph": [False, True]}
VIEWS = {"gradient_as_bucket_view": True}
CONTENDERS: dict[str, dict[str, Any]] = {
    "default": {"builder": "lightning_autosync.strategy.choice:choose_plan", "known": True, **VIEWS},
    "searched": {"builder": "tests.benchmarks.busy_cores:searched_plan", **VIEWS},
}


def searched_plan(
    workload: Workload, cluster: ClusterSpec, constants: dict[str, Any] | None = None
) -> tuple[SyncPlan, str]:
    """The plan with which a job begins whose links have been measured, and the reason for it.

    Args:
        constants: costs of the hosts; None takes the default costs.
    """
    costs = Constants(cores=usable_cores()) if constants is None else Constants.from_dict(constants)
    links = JobLinks(cluster, costs, origin=DESCRIBED)
    found = order_plans(search_plans(workload, links, TuningSettings(search=SEARCH)), links)
    return found.plans[0].plan, found.reason


def bench(ranks: int, gbit: float) -> BenchResult:
    with WorkerPool(ranks) as pool:
        constants, told = measured_hosts(pool, "local", paced=False)
    print(told, flush=True)
    searched = {**CONTENDERS["searched"], "constants": constants.to_dict()}
    cluster = ClusterSpec.uniform(nodes=ranks, bandwidth=gbit * GBIT, latency=50e-6, name=f"{gbit:g} Gbit/s")
    return run_bench(
        BenchSettings.parse(
            {
                "cluster": cluster.to_dict(),
                "launch": {"kind": "emulated"},
                "model": MODEL,
                "ddp": DDP,
                "contenders": {**CONTENDERS, "searched": searched},
                "warm_up": 5,
                "rounds": 5,
                "steps": 8,
            }
        )
    )


def main(*arguments: str) -> None:
    rates = [float(each) for each in arguments] or RATES
    table = Table("ranks", "Gbit/s", "contender", "ms", "best DDP ms", "speedup", "interval", "busy cores", "plan")
    for ranks in RANKS:
        for gbit in rates:
            result = bench(ranks, gbit)
            best = result.measurements[result.best_ddp].median
            for name in CONTENDERS:
                speedup = result.speedup(name)
                row = [str(ranks), f"{gbit:g}", name, f"{1e3 * result.measurements[name].median:.1f}"]
                row += [f"{1e3 * best:.1f} ({result.best_ddp})", f"{speedup.median:.3f}"]
                row += [f"{speedup.low:.3f} .. {speedup.high:.3f}", f"{result.foreign_cores or 0.0:.2f}"]
                row.append(result.preparation.reasons.get(name, ""))
                print(" | ".join(row), flush=True)
                table.add_row(*row)
    Console(width=170).print(table)


if __name__ == "__main__":
    main(*sys.argv[1:])
