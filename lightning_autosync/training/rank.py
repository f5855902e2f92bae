"""One rank of a training: a Lightning Trainer in a process that a launcher has started."""

from __future__ import annotations

import errno
import inspect
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import unknown_name
from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.errors import ClusterError, DocumentError, UnwritableError
from lightning_autosync.measure.models.model import Batch, Model
from lightning_autosync.measure.models.recipes import model_of
from lightning_autosync.plan import SyncPlan
from lightning_autosync.strategy.lightning import AutoSyncStrategy
from lightning_autosync.strategy.settings import PlanOfFile
from lightning_autosync.targets import make, make_arguments
from lightning_autosync.training.settings import TrainingResult, TrainingSettings

_PLAIN = {bool, int, float, str, NoneType}


class BenchModule(L.LightningModule):
    """A bench model and its batches; logs ``loss``.

    Parameters have the same names as in the bench, so that plans from there fit.

    Args:
        world_size: number of ranks, each with its own batches.
    """

    _inner: torch.nn.Module

    def __init__(self, model: Model, world_size: int) -> None:
        super().__init__()
        self._batches = _Batches(model, world_size)
        self._rate = model.learning_rate or 0.0
        inner = model.module()
        for kind in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            vars(self)[kind] = vars(inner)[kind]  # shared, so that what goes to a device goes there in both
        object.__setattr__(self, "_inner", inner)  # not as a submodule, which would prefix all names

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss: Tensor = self._inner(*batch)
        self.log("loss", loss.detach())
        return loss

    def train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self._batches, batch_size=None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self._rate)


class _Batches(Dataset[Batch]):
    """The batches of all ranks, one per item; a distributed sampler assigns them to ranks."""

    def __init__(self, model: Model, world_size: int) -> None:
        self._batches = [batch for rank in range(world_size) for batch in model.batches(rank)]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Batch:
        return self._batches[index]


class StepTimes(L.Callback):
    """Records the seconds of each training step, including the loading of its batch."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._last = _now(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        now = _now(trainer)
        self.seconds.append(now - self._last)
        self._last = now

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._last = _now(trainer)  # validation within an epoch does not count as part of a step


def _now(trainer: L.Trainer) -> float:
    """The time at which all work of this rank so far is done, also that on its accelerator, in seconds."""
    device = trainer.strategy.root_device
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


@dataclass(frozen=True)
class RankTraining:
    """The training of one rank.

    Attributes:
        directory: folder for the Trainer's output.
        nodes: number of nodes in the job, for Lightning.
        devices: number of ranks per node, for Lightning.
        cluster: the cluster of the job; None if unknown.
        plan: the plan from the file in the settings; None if there is no file.
    """

    settings: TrainingSettings
    directory: str
    nodes: int
    devices: int
    cluster: ClusterSpec | None = None
    plan: SyncPlan | None = None


def train_worker(request: dict[str, Any]) -> dict[str, Any] | None:
    """Train as a worker of a pool; returns the result as plain data on rank 0, None elsewhere.

    Args:
        request: documents ``settings``, ``cluster`` and ``plan`` of the training (the latter two may be None), and its
            ``directory``.
    """
    settings, cluster, plan = _parsed(request)
    shape = (1, int(os.environ["WORLD_SIZE"])) if cluster is None else _shape(cluster, settings)
    result = train_rank(RankTraining(settings, request["directory"], *shape, cluster, plan))
    return None if result is None else result.to_dict()


def train_task(request: dict[str, Any], nodes: int, devices: int) -> TrainingResult | None:
    """Like `train_worker`, as one rank of an already launched job; rank 0 writes ``result.json``."""
    settings, cluster, plan = _parsed(request)
    torch.set_num_threads(settings.threads)
    result = train_rank(RankTraining(settings, request["directory"], nodes, devices, cluster, plan))
    if result is not None:
        result.write(Path(request["directory"]))
    return result


def _parsed(request: dict[str, Any]) -> tuple[TrainingSettings, ClusterSpec | None, SyncPlan | None]:
    cluster, plan = request["cluster"], request["plan"]
    return (
        TrainingSettings.parse(request["settings"]),
        None if cluster is None else ClusterSpec.from_dict(cluster),
        None if plan is None else SyncPlan.from_dict(plan),
    )


def train_rank(job: RankTraining) -> TrainingResult | None:
    """Make model, data and Trainer, train, and gather the results of all ranks; returns them on rank 0.

    Raises:
        DocumentError: (or a subclass) settings do not fit; the same on every rank.
    """
    settings = job.settings
    L.seed_everything(settings.seed, workers=True, verbose=False)
    model, data = _model(job), None
    if settings.data_module is not None:
        data = make("data", settings.data_module, L.LightningDataModule)
    times = StepTimes()
    trainer = _trainer(job, times)
    begin = time.perf_counter()
    with _disk_of(job.directory):
        trainer.fit(model, data, ckpt_path=settings.checkpoint)
    seconds = time.perf_counter() - begin
    by_rank = gather_json(times.seconds) if dist.is_initialized() else [times.seconds]
    return _result(job, trainer, seconds, by_rank) if trainer.is_global_zero else None


@contextmanager
def _disk_of(directory: str) -> Iterator[None]:
    """A context in which errors of a full or read-only disk, from loggers and checkpoints, become one line.

    Raises:
        UnwritableError: a file could not be written; the error names the directory if the system names no file.
    """
    try:
        yield
    except OSError as cause:
        if cause.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        raise UnwritableError(
            f"{cause.filename2 or cause.filename or directory}: cannot be written: {cause.strerror}"
        ) from cause


def _model(job: RankTraining) -> L.LightningModule:
    recipe = job.settings.module
    if recipe is None:
        return BenchModule(model_of(job.settings.model), job.nodes * job.devices)
    made: L.LightningModule = make("model", recipe, L.LightningModule)
    return made


def _trainer(job: RankTraining, times: StepTimes) -> L.Trainer:
    arguments = make_arguments("trainer", job.settings.trainer)
    check_trainer(arguments)
    callbacks = [*(arguments.pop("callbacks", None) or []), times]
    try:
        return L.Trainer(
            strategy=_strategy(job),
            num_nodes=job.nodes,
            devices=job.devices,
            default_root_dir=job.directory,
            callbacks=callbacks,
            **arguments,
        )
    except (TypeError, MisconfigurationException) as error:
        raise DocumentError(f"trainer: {' '.join(str(error).split())}") from error


def check_trainer(arguments: dict[str, Any]) -> None:
    """Refuse arguments that the Trainer does not have, and values of a wrong type if it takes plain values only.

    The Trainer does not check types, and would fail later with a traceback. Values with ``_target_`` pass.

    Raises:
        DocumentError: a name is unknown, or a value has a wrong type.
    """
    names = list(inspect.signature(L.Trainer.__init__).parameters)[1:]
    for name in arguments:
        if name not in names:
            raise DocumentError(f"trainer.{name}: {unknown_name(name, names)}")
    for name, hint in get_type_hints(L.Trainer.__init__).items():
        kinds, value = get_args(hint) or (hint,), arguments.get(name)
        if isinstance(value, dict) and "_target_" in value:
            continue
        if name in arguments and _PLAIN.issuperset(kinds) and not isinstance(value, kinds):
            allowed = " or ".join("null" if kind is NoneType else kind.__name__ for kind in kinds)
            raise DocumentError(f"trainer.{name}: {value!r} is not allowed; allowed: {allowed}")


def _strategy(job: RankTraining) -> Strategy:
    sync = job.settings.sync
    common: dict[str, Any] = {
        # Given explicitly, because Lightning takes any job inside a SLURM allocation for a job of SLURM's.
        "cluster_environment": SLURMEnvironment() if job.settings.launch.kind == "slurm" else TorchElasticEnvironment(),
        "timeout": timedelta(seconds=job.settings.timeout),
    }
    try:
        if sync.strategy == "ddp":
            return DDPStrategy(**common, **sync.arguments)
        plan: Any = sync.plan if job.plan is None else PlanOfFile(job.plan, str(sync.plan))
        return AutoSyncStrategy(plan, sync.semantics, **{"cluster": job.cluster, **common, **sync.arguments})
    except (TypeError, ValueError) as error:
        if isinstance(error, DocumentError):
            raise
        raise DocumentError(f"sync.arguments: {error}") from error


def _shape(cluster: ClusterSpec, settings: TrainingSettings) -> tuple[int, int]:
    """Number of nodes and devices per node, for Lightning; ranks on CPUs may count as nodes with one device each."""
    devices = {node.devices for node in cluster.nodes}
    in_order = list(cluster.rank_nodes) == sorted(cluster.rank_nodes)
    if len(devices) == 1 and in_order:
        return len(cluster.nodes), devices.pop()
    accelerator = settings.trainer.get("accelerator", "auto")
    if accelerator != "cpu" and (accelerator != "auto" or torch.accelerator.is_available()):
        raise ClusterError(
            f"cluster '{cluster.name}': on accelerators Lightning needs equally many devices per node and ranks in "
            "node order; change the cluster, or set trainer.accelerator=cpu"
        )
    os.environ |= {"LOCAL_RANK": "0", "GROUP_RANK": os.environ["RANK"]}
    return cluster.world_size, 1


def _result(job: RankTraining, trainer: L.Trainer, seconds: float, by_rank: list[list[float]]) -> TrainingResult:
    strategy, settings = trainer.strategy, job.settings
    plan = strategy.plan if isinstance(strategy, AutoSyncStrategy) else None
    checkpoint = trainer.checkpoint_callback
    return TrainingResult(
        settings=settings,
        emulated={"links": settings.emulated, "compute": settings.paced},
        cluster=None if job.cluster is None else job.cluster.to_dict(),
        world_size=trainer.world_size,
        strategy=settings.sync.strategy,
        plan=None if plan is None else plan.to_dict(),
        metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
        epochs=trainer.current_epoch,
        steps=trainer.global_step,
        seconds=seconds,
        median_step_seconds=median_step(by_rank),
        step_seconds_by_rank=tuple(map(tuple, by_rank)),
        checkpoint=getattr(checkpoint, "best_model_path", "") or None,
    )


def median_step(by_rank: list[list[float]]) -> float | None:
    """The median over all ranks and steps, without each rank's first step, which includes setup."""
    later = [seconds for ranks in by_rank for seconds in ranks[1:]] or [one for ranks in by_rank for one in ranks]
    return statistics.median(later) if later else None
