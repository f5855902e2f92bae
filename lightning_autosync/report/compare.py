"""Compares a step measured on live workers with its prediction."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine.tracing import StepTrace, Times
from lightning_autosync.measure import replica_calls
from lightning_autosync.measure.emulation.launch import EmulatedLaunch
from lightning_autosync.measure.workers import LaunchError, WorkerPool
from lightning_autosync.plan import Schedule, SyncPlan, compile_plan
from lightning_autosync.replay import Constants, MessageSpan, Replay, Span, Timeline
from lightning_autosync.report.timeline import TIMELINES, draw_timelines, save_timelines, write_trace
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
    """Run a plan with paced compute in ``pool``, and draw its median step next to the predicted one.

    Writes ``timeline.svg``, ``timeline.png``, ``trace.json`` and ``timelines.json`` to ``directory``. The use of links
    is measured only on emulated links; otherwise the measured timeline has no links.

    Args:
        plan: a plan for the workload on the cluster.
        workload: variables and times.
        cluster: cluster of the pool's workers.
        pool: workers, one for each rank.
        directory: directory of the files.
        constants: costs of the hosts; None takes the defaults.
        warm_up: number of steps before the traced ones.
        steps: number of traced steps.

    Returns:
        The timelines ``measured`` and ``predicted``.

    Raises:
        AutoSyncError: plan, workload and cluster do not fit each other, or a worker failed.
    """
    schedule = compile_plan(plan, workload, cluster)
    prediction = Replay(workload, cluster, constants).predict(schedule)
    traces, sent = _trace(plan, workload, cluster, pool, warm_up, steps)
    durations = [max(trace.end for trace in one) for one in traces]
    median = durations.index(statistics.median_low(durations))
    links = busy_shares(pool.launch, sent, durations[median]) if isinstance(pool.launch, EmulatedLaunch) else {}
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
    """The records [steps][ranks], and the bytes of a step on each emulated link."""
    documents: dict[str, Any] = {
        "workload": workload.to_dict(),
        "plan": plan.to_dict(),
        "cluster": cluster.to_dict(),
        "warm_up": warm_up,
        "timeout": pool.timeout,
    }
    counts = [_count(pool)]
    # Run once without traced steps, to subtract the bytes of connecting and warming up from those of the second run.
    pool.run(replica_calls.trace, steps=0, **documents)
    counts.append(_count(pool))
    found = pool.run(replica_calls.trace, steps=steps, **documents)
    counts.append(_count(pool))
    sent = {name: (last - 2 * counts[1][name] + counts[0][name]) / steps for name, last in counts[2].items()}
    return [[StepTrace(**trace) for trace in traces] for traces in zip(*found, strict=True)], sent


def _count(pool: WorkerPool) -> dict[str, int]:
    return bytes_on_links(pool.launch) if isinstance(pool.launch, EmulatedLaunch) else {}


def measured_timeline(schedule: Schedule, traces: Sequence[StepTrace], links: Mapping[str, float]) -> Timeline:
    """The timeline of one step, which all ranks began together.

    A message is ready when the last rank has packed it. It starts when the first rank hands it to the transport and
    ends when the last rank has the sum. Messages that no rank sent are left out.

    Args:
        schedule: the schedule that ran.
        traces: [ranks] records of the step.
        links: busy share of each direction of a link; empty if not measured.
    """
    spans = []
    for message in schedule.messages:
        started = _known([trace.started for trace in traces], message.index)
        completed = _known([trace.completed for trace in traces], message.index)
        if started and completed:
            ready = _known([trace.ready for trace in traces], message.index)
            start = min(started)
            spans.append(MessageSpan(message.name, start, max(completed), max(ready, default=start)))
    compute = tuple(
        (
            Span("forward", 0.0, trace.forward),
            Span("backward", trace.forward, trace.backward),
            Span("optimizer", trace.synchronized, trace.end),
        )
        for trace in traces
    )
    return Timeline(max(trace.end for trace in traces), tuple(spans), compute, links)


def _known(times: Sequence[Times], index: int) -> list[float]:
    """The known times of one message on all ranks."""
    return [seconds for of_rank in times if (seconds := of_rank[index]) is not None]


def bytes_on_links(launch: EmulatedLaunch) -> dict[str, int]:
    """Bytes, with framing, sent so far over each direction of an emulated link, by its name ``a > b``.

    The counters are those of the kernel's token buckets. They count the headers of every frame, even if the kernel
    forwards several frames in one piece.

    Raises:
        LaunchError: ``tc`` failed, for example because the network was removed.
    """
    network = launch.network
    counted = [_sent(namespace) for namespace in launch.namespaces]
    return {
        f"{network.places[port.place]} > {network.places[peer.place]}": counted[port.place][port.interface]
        for pair in zip(network.ports[::2], network.ports[1::2], strict=True)
        for port, peer in (pair, pair[::-1])
    }


def busy_shares(launch: EmulatedLaunch, bytes_of_step: Mapping[str, float], step_time: float) -> dict[str, float]:
    """Shares of a step (0 to 1) for which its bytes keep links busy, by name ``a > b``."""
    rates = [port.rate for port in launch.network.ports]
    return {
        name: min(1.0, max(0.0, sent) / rate / step_time)
        for (name, sent), rate in zip(bytes_of_step.items(), rates, strict=True)
    }


def _sent(namespace: str) -> dict[str, int]:
    """Bytes sent so far, by interface of the namespace."""
    command = ["tc", "-n", namespace, "-s", "-j", "qdisc", "show"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise LaunchError(f"namespace {namespace}: tc: {' '.join(finished.stderr.split()) or finished.returncode}")
    return {one["dev"]: int(one["bytes"]) for one in json.loads(finished.stdout) if one["kind"] == "tbf"}
