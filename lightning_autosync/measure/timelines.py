"""Measures the timeline of a step on live workers, and the traffic of emulated links."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Mapping
from typing import Any

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine.tracing import StepTrace
from lightning_autosync.measure import replica_calls
from lightning_autosync.measure.emulation.launch import EmulatedLaunch
from lightning_autosync.measure.errors import LaunchError
from lightning_autosync.measure.traced_step import timeline_of
from lightning_autosync.measure.workers import WorkerPool
from lightning_autosync.plan import SyncPlan, compile_plan
from lightning_autosync.replay import Timeline
from lightning_autosync.workload import Workload


def measure_timeline(
    plan: SyncPlan, workload: Workload, cluster: ClusterSpec, pool: WorkerPool, warm_up: int = 3, steps: int = 5
) -> Timeline:
    """Run a plan with paced compute in ``pool``; the timeline of its median step.

    The use of links is measured only on emulated links; otherwise the timeline has no links.

    Args:
        cluster: cluster of the pool's workers.
        pool: workers, one for each rank.
        warm_up: number of steps before the traced ones.
        steps: number of traced steps.

    Raises:
        AutoSyncError: plan, workload and cluster do not fit each other, or a worker failed.
    """
    schedule = compile_plan(plan, workload, cluster)
    traces, sent = _trace(plan, workload, cluster, pool, warm_up, steps)
    durations = [max(trace.end for trace in one) for one in traces]
    median = durations.index(statistics.median_low(durations))
    links = busy_shares(pool.launch, sent, durations[median]) if isinstance(pool.launch, EmulatedLaunch) else {}
    return timeline_of(schedule, traces[median], links)


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
