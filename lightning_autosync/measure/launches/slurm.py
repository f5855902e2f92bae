"""SLURM jobs: submitted with submitit, one task per rank."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_autosync.cluster.spec import ClusterSpec
from lightning_autosync.errors import ClusterError, needed_for
from lightning_autosync.interrupts import signals_as_exceptions
from lightning_autosync.measure.errors import LaunchError
from lightning_autosync.measure.launches.allocation import require_tool

KILL_ALL = ["--kill-on-bad-exit=1"]
"""Without this option srun lets the other tasks of a job wait for one that has failed."""
_REMARK = "You can check full logs"
"""Submitit's text below a task's traceback."""


def tasks_of(cluster: ClusterSpec) -> tuple[int, int]:
    """The number of nodes, and of tasks per node.

    Raises:
        ClusterError: nodes have different numbers of devices, which SLURM's tasks per node cannot express, or ranks are
            not numbered node by node, as SLURM numbers its tasks.
    """
    devices = {node.devices for node in cluster.nodes}
    if len(devices) > 1:
        raise ClusterError(
            f"cluster '{cluster.name}': nodes[].devices: launch=slurm needs the same number on every node"
        )
    if list(cluster.rank_nodes) != sorted(cluster.rank_nodes):
        raise ClusterError(f"cluster '{cluster.name}': rank_order: launch=slurm needs ranks numbered node by node")
    return len(cluster.nodes), devices.pop()


def submit(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    folder: Path,
    nodes: int,
    tasks_per_node: int,
    parameters: Mapping[str, Any],
) -> Any:
    """Submit a job in which every task calls ``function(**arguments)``; returns submitit's job.

    Args:
        function: function that the nodes can import.
        arguments: arguments of the function.
        folder: folder for the batch script, logs and results, on a file system that the nodes share.
        tasks_per_node: number of ranks on each node.
        parameters: further parameters of submitit's executor, such as ``slurm_partition`` or ``timeout_min``.

    Raises:
        MissingPackageError: submitit is not installed.
        LaunchError: SLURM is missing, a parameter is unknown, or SLURM refuses the job.
    """
    with needed_for("launch=slurm"):
        import submitit
    for tool in ("sbatch", "srun"):
        require_tool(tool)
    try:
        executor = submitit.AutoExecutor(folder, cluster="slurm")
        shape = {"name": "autosync", "nodes": nodes, "tasks_per_node": tasks_per_node}
        executor.update_parameters(**{"slurm_srun_args": KILL_ALL, **parameters, **shape})
    except (TypeError, ValueError, NameError) as error:
        raise LaunchError(f"launch.parameters: {' '.join(str(error).split())}") from None
    try:
        return executor.submit(function, **arguments)
    except submitit.core.utils.FailedJobError as error:
        raise LaunchError(f"launch=slurm: SLURM rejected the job: {' '.join(str(error).split())}") from None


def results(job: Any) -> list[Any]:
    """Wait for every task of a job and return their results. A signal that ends the wait cancels the job.

    Raises:
        LaunchError: tasks failed; the message names each with the last line of its traceback.
        KeyboardInterrupt, SystemExit: SIGINT, or SIGTERM or SIGHUP, arrived during the wait.
    """
    with signals_as_exceptions() as signals:
        try:
            job.wait()
            return _collected(job)
        except (KeyboardInterrupt, SystemExit):
            with signals.deferred():
                print(_cancelled(job), file=sys.stderr, flush=True)
            raise


def _collected(job: Any) -> list[Any]:
    import submitit

    found, failures = [], []
    for rank in range(job.num_tasks):
        try:
            found.append(job.task(rank).result())
        except (submitit.core.utils.FailedJobError, submitit.core.utils.UncompletedJobError) as error:
            told = str(error).partition(_REMARK)[0]
            lines = [line.strip() for line in told.splitlines() if line.strip("- \t")]
            failures.append(f"rank {rank}: {lines[-1] if lines else 'no result'}")
    if failures:
        raise LaunchError(f"SLURM job {job.job_id}: {'; '.join(failures)}; output in {job.paths.folder}")
    return found


def _cancelled(job: Any) -> str:
    """Cancel a job; returns a message about the outcome."""
    try:
        job.cancel()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"interrupted; SLURM job {job.job_id} continues, because it could not be cancelled: {error}"
    return f"interrupted; SLURM job {job.job_id} is cancelled"
