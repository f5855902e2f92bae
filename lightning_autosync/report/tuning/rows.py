"""The numbers of a tuning run in one row, for tables and for those who go on from there."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lightning_autosync.report.tuning.run import TuningRun
from lightning_autosync.report.tuning.words import bound_share


def summary_row(run: TuningRun) -> dict[str, Any]:
    """Plain data: what was tuned, how, and what came of it.

    ``over_ddp`` and ``over_builder`` say how many times as fast as these the best plan is (``median``, ``low``,
    ``high``, paired by round of the last comparison); None where that was not measured.
    ``left_out`` names plans that failed in that comparison, and why.
    """
    final = run.final
    builder = None if final is None else final.builder
    return {
        "directory": str(run.directory),
        "workload": run.workload.name,
        "cluster": run.cluster.name,
        "sampler": run.sampler,
        "seed": run.seed,
        "trials": len(run.trials),
        "seconds": None if run.result.best is None else run.best_seconds,
        "over_ddp": None if final is None else asdict(final.speedup(final.ddp)),
        "over_builder": None if final is None or builder is None else asdict(final.speedup(builder)),
        "left_out": {} if final is None else dict(final.left_out),
        "bound_share": None if run.result.best is None else bound_share(run),
        "hit_rate": run.hit_rate,
        "trials_to_98_percent": run.trials_to_98,
        "trials_per_minute": run.result.timing.trials_per_minute,
        "emulated": run.result.emulated,
    }
