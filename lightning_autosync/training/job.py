"""Starts the ranks of a training, or runs this process as one of them."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from lightning_autosync import errors
from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import is_path
from lightning_autosync.errors import DocumentError, PlanError, UnwritableError
from lightning_autosync.hybrid import HybridPlan
from lightning_autosync.measure.bench.preparation import make_cluster
from lightning_autosync.measure.errors import LaunchError
from lightning_autosync.measure.launches.launch import is_slurm_task, refuse_within_torchrun, require_torchrun
from lightning_autosync.measure.launches.settings import AnyLaunch, LaunchSettings, SlurmSettings
from lightning_autosync.measure.launches.slurm import results, submit, tasks_of
from lightning_autosync.measure.workers import WorkerError, WorkerPool
from lightning_autosync.plan import SyncPlan, builders
from lightning_autosync.training.settings import TrainingResult, TrainingSettings

START_TIMEOUT = 120.0
"""Seconds in which all ranks must start."""


def run_job(settings: TrainingSettings, directory: Path) -> TrainingResult | None:
    """Train, and write the result to ``result.json`` in ``directory``.

    Returns:
        Rank 0's result; None on other ranks, and for a job that is submitted without waiting for it.

    Raises:
        AutoSyncError: settings do not fit, ranks cannot be started, or a rank failed.
    """
    from lightning_autosync.training.rank import check_trainer

    check_trainer(settings.trainer)
    cluster = None if settings.cluster is None else make_cluster(settings, settings.ranks)
    shape = _started_shape(settings.launch)
    ranks = settings.ranks or 2
    if shape is not None:
        ranks = math.prod(shape)
    elif cluster is not None:
        ranks = cluster.world_size
    request = {
        "settings": settings.model_dump(mode="json"),
        "directory": str(directory.absolute()),
        "cluster": None if cluster is None else cluster.to_dict(),
        "plan": _plan_document(settings, ranks, shape is not None),
    }
    if isinstance(settings.launch, LaunchSettings):
        result = _train_by_workers(settings, settings.launch, cluster, ranks, request)
        result.write(directory)
        return result
    if isinstance(settings.launch, SlurmSettings) and shape is None:
        return _train_by_slurm(settings, settings.launch, cluster, request)
    assert shape is not None
    from lightning_autosync.training.rank import train_task

    return train_task(request, *shape)


def _started_shape(launch: AnyLaunch) -> tuple[int, int] | None:
    """Numbers of nodes and of ranks per node of the job to which this process belongs; None before ranks start.

    Raises:
        LaunchError: torchrun started this process for another launch, or did not for its own; or nodes have different
            numbers of ranks.
    """
    if isinstance(launch, LaunchSettings):
        refuse_within_torchrun(launch.kind)
        return None
    if isinstance(launch, SlurmSettings):
        return _slurm_shape() if is_slurm_task() else None
    require_torchrun("train")
    return _torchrun_shape()


def _plan_document(settings: TrainingSettings, ranks: int, started: bool) -> dict[str, Any] | None:
    """The content of the plan file, which only this machine needs; None for a builder, whose name is checked.

    ``started`` tells whether the ranks of the job run already.

    Raises:
        PlanError: the file cannot be used or is for another number of ranks, or there is no builder of this name.
    """
    plan = settings.sync.plan
    if plan is None:
        return None
    if is_path(plan):
        if HybridPlan.is_in(plan):
            raise PlanError(
                f"{plan}: 'autosync train' takes no hybrid plans, which split operators; train in a script with "
                f"Trainer(strategy=AutoDDLStrategy(plan={plan!r}))"
            )
        found = SyncPlan.load(plan)
        if (planned := found.world_size) != ranks:
            other = f"give ranks={planned}" if settings.cluster is None else f"give a cluster of {planned} ranks"
            raise PlanError(
                f"{plan}: world_size: the plan is for {planned} ranks, but the job has {ranks}; give a plan for "
                f"{ranks} ranks, such as one of 'autosync tune', or {f'start {planned} ranks' if started else other}"
            )
        return found.to_dict()
    builders.find(plan)
    return None


def _train_by_workers(
    settings: TrainingSettings,
    launch: LaunchSettings,
    cluster: ClusterSpec | None,
    ranks: int,
    request: dict[str, Any],
) -> TrainingResult:
    from lightning_autosync.training.rank import train_worker

    with (
        launch.open(cluster) as place,
        WorkerPool(
            ranks,
            place,
            timeout=START_TIMEOUT,
            threads=settings.threads,
            order_timeout=math.inf,
            process_group=False,
            echo=True,
        ) as pool,
    ):
        try:
            found = pool.run(train_worker, request=request)[0]
        except WorkerError as error:
            raise _plain(error) from error
    return TrainingResult.from_dict(found, "rank 0")


def _plain(error: WorkerError) -> Exception:
    """The error that a rank raised, if it refuses an input; otherwise ``error`` itself."""
    if error.kind == UnwritableError.__name__:
        return UnwritableError(f"rank {error.rank}: {error.reason}")
    kind = getattr(errors, error.kind, None)
    if isinstance(kind, type) and issubclass(kind, DocumentError):
        return kind(error.reason)
    return error


def _train_by_slurm(
    settings: TrainingSettings, launch: SlurmSettings, cluster: ClusterSpec | None, request: dict[str, Any]
) -> TrainingResult | None:
    nodes, tasks = (1, settings.ranks or 2) if cluster is None else tasks_of(cluster)
    from lightning_autosync.training.rank import train_task

    directory = Path(request["directory"])
    arguments = {"request": request, "nodes": nodes, "devices": tasks}
    job = submit(train_task, arguments, directory / "slurm", nodes, tasks, launch.parameters)
    print(f"submitted SLURM job {job.job_id}; its output is in {directory / 'slurm'}", flush=True)
    if not launch.wait:
        return None
    results(job)
    return TrainingResult.read(directory)


def _torchrun_shape() -> tuple[int, int]:
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    _require_equal_nodes(world, world // local, local)
    return world // local, local


def _slurm_shape() -> tuple[int, int]:
    nodes = int(os.environ.get("SLURM_NNODES", os.environ.get("SLURM_JOB_NUM_NODES", "1")))
    tasks = int(os.environ["SLURM_NTASKS"])
    _require_equal_nodes(tasks, nodes, tasks // nodes)
    return nodes, tasks // nodes


def _require_equal_nodes(ranks: int, nodes: int, devices: int) -> None:
    if nodes * devices != ranks:
        raise LaunchError(
            f"launch: the job has {ranks} ranks, but not as many on each node; start the same number of ranks on each"
        )
