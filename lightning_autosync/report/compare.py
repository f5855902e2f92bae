"""A step measured on live workers beside the same step predicted."""

from __future__ import annotations

import os
import statistics
from pathlib import Path

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan import SyncPlan, compile_plan
from lightning_autosync.report.measured import busy_shares, measured_timeline
from lightning_autosync.report.timeline import draw_timelines, write_trace
from lightning_autosync.report.timelines_file import TIMELINES, save_timelines
from lightning_autosync.runtime.tracing import StepTrace
from lightning_autosync.simulator import Constants, Replay, Timeline
from lightning_autosync.workers import WorkerPool
from lightning_autosync.workload import Workload

_TRACE = "lightning_autosync.bench.validation.replica:trace"


def compare_timelines(
    plan: SyncPlan,
    workload: Workload,
    cluster: ClusterSpec,
    pool: WorkerPool,
    directory: str | os.PathLike[str],
    constants: Constants | None = None,
    warm_up: int = 3,
    steps: int = 5,
) -> dict[str, Timeline]:
    """Run a plan with paced compute in ``pool``, and draw its median step beside the predicted one.

    ``timeline.svg``, ``timeline.png``, ``trace.json`` and ``timelines.json`` appear in ``directory``.

    Args:
        plan: for the workload on the cluster.
        workload: variables and times.
        cluster: where the pool's workers are.
        pool: of as many ranks.
        directory: for the pictures.
        constants: of the hosts.
        warm_up: steps before those that are traced.
        steps: that are traced.

    Returns:
        The timelines ``measured`` and ``predicted``.

    Raises:
        AutoSyncError: plan, workload and cluster do not fit each other, or a worker failed.
    """
    schedule = compile_plan(plan, workload, cluster)
    prediction = Replay(workload, cluster, constants).predict(schedule)
    found = pool.run(
        _TRACE,
        workload=workload.to_dict(),
        plan=plan.to_dict(),
        cluster=cluster.to_dict(),
        warm_up=warm_up,
        steps=steps,
        timeout=pool.timeout,
    )
    by_step = [[StepTrace(**trace) for trace in traces] for traces in zip(*found, strict=True)]
    lasting = [max(trace.end for trace in traces) for traces in by_step]
    median = lasting.index(statistics.median_low(lasting))
    timelines = {
        "measured": measured_timeline(schedule, by_step[median], busy_shares(prediction, lasting[median])),
        "predicted": prediction.timeline,
    }
    for name in ("timeline.svg", "timeline.png"):
        draw_timelines(timelines, Path(directory) / name)
    write_trace(timelines, Path(directory) / "trace.json")
    save_timelines(timelines, Path(directory) / TIMELINES)
    return timelines
