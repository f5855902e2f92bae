"""`predict`: a plan priced and pictured without a cluster."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_autosync.cluster import ClusterSpec, synchronization_time
from lightning_autosync.documents import write_data
from lightning_autosync.plan import SyncPlan, compile_plan
from lightning_autosync.report.timeline import draw_timelines, write_trace
from lightning_autosync.simulator import Constants, Prediction, Replay
from lightning_autosync.workload import Workload

_BUSIEST = 8
"""Links that the text names."""


def predict(
    plan: SyncPlan,
    workload: Workload,
    cluster: ClusterSpec,
    directory: str | os.PathLike[str] | None = None,
    constants: Constants | None = None,
) -> str:
    """What a step under a plan takes, as text; with a ``directory``, as pictures and data too.

    The directory gets ``timeline.svg``, ``timeline.png``, ``trace.json`` (for Chrome's viewer) and ``prediction.json``.

    Raises:
        PlanError: plan, workload and cluster do not fit each other.
        ClusterError: the rates of the cluster are unknown.
    """
    schedule = compile_plan(plan, workload, cluster)
    prediction = Replay(workload, cluster, constants).predict(schedule)
    if directory is not None:
        _write(prediction, Path(directory))
    bound = synchronization_time(cluster, workload.bytes)
    return _text(prediction, bound)


def _write(prediction: Prediction, directory: Path) -> None:
    timelines = {"predicted": prediction.timeline}
    for name in ("timeline.svg", "timeline.png"):
        draw_timelines(timelines, directory / name)
    write_trace(timelines, directory / "trace.json")
    path = [{"name": span.name, "start": span.start, "end": span.end} for span in prediction.critical_path]
    data = {
        "step_time": prediction.step_time,
        "synchronization_time": prediction.synchronization_time,
        "timeline": prediction.timeline.to_dict(),
        "critical_path": path,
    }
    write_data(directory / "prediction.json", data)


def _text(prediction: Prediction, bound: float) -> str:
    synchronization = prediction.synchronization_time
    share = f" ({bound / synchronization:.0%} reached)" if synchronization else ""
    lines = [
        f"step                 {prediction.step_time * 1e3:10.1f} ms",
        f"synchronization      {synchronization * 1e3:10.1f} ms",
        f"bound, all at once   {bound * 1e3:10.1f} ms{share}",
        "busiest links",
    ]
    busiest = sorted(prediction.timeline.links.items(), key=lambda item: -item[1])[:_BUSIEST]
    lines += [f"  {name:30s} {busy:6.1%}" for name, busy in busiest]
    lines.append("critical path")
    lines += [f"  {span.start * 1e3:10.1f} ms  {span.name}" for span in prediction.critical_path]
    return "\n".join(lines) + "\n"
