"""A step measured on live workers beside the same step predicted."""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine.tracing import StepTrace
from lightning_autosync.measure import replica_calls
from lightning_autosync.measure.emulation.launch import EmulatedLaunch
from lightning_autosync.measure.workers import WorkerPool
from lightning_autosync.plan import SyncPlan, compile_plan
from lightning_autosync.replay import Constants, Replay, Timeline
from lightning_autosync.report.link_use import busy_shares, bytes_on_links
from lightning_autosync.report.measured import measured_timeline
from lightning_autosync.report.timeline import draw_timelines, write_trace
from lightning_autosync.report.timelines_file import TIMELINES, save_timelines
from lightning_autosync.workload import Workload


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

    ``timeline.svg``, ``timeline.png``, ``trace.json`` and ``timelines.json`` appear in ``directory``. How busy links
    are is measured where they are emulated; elsewhere the measured step is without.

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
    traces, sent = _trace(plan, workload, cluster, pool, warm_up, steps)
    lasting = [max(trace.end for trace in one) for one in traces]
    median = lasting.index(statistics.median_low(lasting))
    links = busy_shares(pool.launch, sent, lasting[median]) if isinstance(pool.launch, EmulatedLaunch) else {}
    timelines = {
        "measured": measured_timeline(schedule, traces[median], links),
        "predicted": prediction.timeline,
    }
    for name in ("timeline.svg", "timeline.png"):
        draw_timelines(timelines, Path(directory) / name)
    write_trace(timelines, Path(directory) / "trace.json")
    save_timelines(timelines, Path(directory) / TIMELINES)
    return timelines


def _trace(
    plan: SyncPlan, workload: Workload, cluster: ClusterSpec, pool: WorkerPool, warm_up: int, steps: int
) -> tuple[list[list[StepTrace]], dict[str, float]]:
    """What every rank recorded, step by step; and the bytes of a step on each emulated link."""
    documents: dict[str, Any] = {
        "workload": workload.to_dict(),
        "plan": plan.to_dict(),
        "cluster": cluster.to_dict(),
        "warm_up": warm_up,
        "timeout": pool.timeout,
    }
    counts = [_count(pool)]
    # The same without the steps that are traced: what connections and warming up send is not theirs.
    pool.run(replica_calls.trace, steps=0, **documents)
    counts.append(_count(pool))
    found = pool.run(replica_calls.trace, steps=steps, **documents)
    counts.append(_count(pool))
    sent = {name: (last - 2 * counts[1][name] + counts[0][name]) / steps for name, last in counts[2].items()}
    return [[StepTrace(**trace) for trace in traces] for traces in zip(*found, strict=True)], sent


def _count(pool: WorkerPool) -> dict[str, int]:
    return bytes_on_links(pool.launch) if isinstance(pool.launch, EmulatedLaunch) else {}
