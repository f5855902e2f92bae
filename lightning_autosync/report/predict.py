"""What a plan will cost, without a cluster: one call from plan, workload and cluster to text, pictures and data."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from lightning_autosync.cluster import ClusterSpec, synchronization_time
from lightning_autosync.documents import write_text
from lightning_autosync.plan import SyncPlan, compile_plan
from lightning_autosync.report.timeline import draw_timelines, write_trace
from lightning_autosync.simulator import Constants, Prediction, Replay, step_bound
from lightning_autosync.workload import Workload

FORMAT = "autosync-prediction/1"
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

    The directory gets ``timeline.svg``, ``timeline.png``, ``trace.json`` (for Chrome's viewer) and ``result.json``.

    Raises:
        PlanError: plan, workload and cluster do not fit each other.
        ClusterError: the rates of the cluster are unknown.
    """
    constants = constants or Constants()
    prediction = Replay(workload, cluster, constants).predict(compile_plan(plan, workload, cluster))
    bounds = {
        "step_bound": step_bound(workload, cluster, constants.framing),
        "synchronization_bound": constants.framing * synchronization_time(cluster, workload.bytes),
    }
    if directory is not None:
        _write(prediction, bounds, Path(directory))
    return _text(prediction, bounds)


def _write(prediction: Prediction, bounds: dict[str, float], directory: Path) -> None:
    timelines = {"predicted": prediction.timeline}
    for name in ("timeline.svg", "timeline.png"):
        draw_timelines(timelines, directory / name)
    write_trace(timelines, directory / "trace.json")
    fields = asdict(prediction)
    del fields["demand"]  # an array of every message on every channel; links and hosts have its sums
    data = {
        "format": FORMAT,
        **fields,
        **bounds,
        "bound_share": bounds["step_bound"] / prediction.step_time,
    }
    write_text(directory / "result.json", json.dumps(data) + "\n")


def _text(prediction: Prediction, bounds: dict[str, float]) -> str:
    step, least = prediction.step_time, bounds["step_bound"]
    lines = [
        f"step                 {step * 1e3:10.1f} ms",
        f"least with overlap   {least * 1e3:10.1f} ms ({least / step:.0%} reached)",
        f"synchronization      {prediction.synchronization_time * 1e3:10.1f} ms",
        f"least, all at once   {bounds['synchronization_bound'] * 1e3:10.1f} ms",
        "busiest links",
    ]
    busiest = sorted(prediction.timeline.links.items(), key=lambda item: -item[1])[:_BUSIEST]
    lines += [f"  {name:30s} {busy:6.1%}" for name, busy in busiest]
    lines.append("critical path")
    lines += [f"  {span.start * 1e3:10.1f} ms  {span.name}" for span in prediction.critical_path]
    return "\n".join(lines) + "\n"
