"""What ranks do: one job after the other under either strategy, and the comparison of what they left behind."""

from __future__ import annotations

import gc
import random
import warnings
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from jobs import make_trainer
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_autosync import AutoSyncFabricStrategy, AutoSyncStrategy, builders
from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan import SyncPlan
from lightning_autosync.workload import Workload
from parity.case import PLANS, Case
from parity.cases import CASES, CONTROLS
from parity.record import difference, flatten

DDP = "ddp"


class Side:
    """One job of a pair: makes Trainers and Fabrics of its strategy, and keeps what must be equal.

    Args:
        case: the pair.
        plan: a name in `PLANS`, or ``ddp``.
        folder: empty, the same on all ranks, of this job alone.
    """

    def __init__(self, case: Case, plan: str, folder: Path) -> None:
        self.case, self.plan, self.folder = case, plan, folder
        self.rank = dist.get_rank()
        self.notes: dict[str, Any] = {}
        self.steps: list[Any] = []

    @property
    def is_ddp(self) -> bool:
        return self.plan == DDP

    def strategy(self, plan: str | None = None, fabric: bool = False, **more: Any) -> Any:
        """A registered name where there are no arguments, else a strategy.

        Args:
            plan: another than this job's.
            fabric: whether it is for Fabric.
            more: arguments for both strategies.
        """
        plan = plan or self.plan
        options = {**self.case.options, **more}
        if plan == DDP:
            if options:
                return (FabricDDP if fabric else DDPStrategy)(**self.case.reference, **options)
            return "ddp_find_unused_parameters_true" if self.case.reference else "ddp"
        given = PLANS[plan]
        if isinstance(given, str):
            if not options:
                return given
            given = {"autosync_allreduce": {"plan": "all_reduce"}, "autosync_ps": {"plan": "ps_load_balancing"}}.get(
                given, {}
            )
        given = {**given, **options}
        if "cluster" in given:
            given["cluster"] = ClusterSpec.from_dict(given["cluster"])
        return (AutoSyncFabricStrategy if fabric else AutoSyncStrategy)(**given)

    def trainer(self, plan: str | None = None, plugins: Any = (), **arguments: Any) -> Trainer:
        """A Trainer whose jobs are watched."""
        callbacks = [*arguments.pop("callbacks", ()), Watcher(self)]
        arguments.setdefault("default_root_dir", self.folder)
        return make_trainer(self.strategy(plan), tuple(plugins), callbacks=callbacks, **arguments)

    def fit(self, module: LightningModule, plan: str | None = None, **arguments: Any) -> Trainer:
        """Train, and note how that ended; ``datamodule``, loaders and ``ckpt_path`` go to ``Trainer.fit``."""
        names = ("datamodule", "train_dataloaders", "val_dataloaders", "ckpt_path", "weights_only")
        given = {name: arguments.pop(name) for name in names if name in arguments}
        trainer = self.trainer(plan, **arguments)
        trainer.fit(module, **given)
        self.note_trained(trainer, module)
        return trainer

    def fabric(self, plan: str | None = None, plugins: Any = (), **arguments: Any) -> Fabric:
        """A Fabric that is launched."""
        strategy = self.strategy(plan, fabric=True)
        environment = TorchElasticEnvironment()
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[environment, *plugins], **arguments)
        fabric.launch()
        return fabric

    def note(self, name: str, value: Any) -> None:
        """Keep a value that must be equal; tensors are copied."""
        while name in self.notes:
            name += "'"
        self.notes[name] = dict(flatten(value))

    def note_trained(self, trainer: Trainer, module: nn.Module) -> None:
        self.note_module(module)
        self.note("optimizers", [optimizer.state_dict() for optimizer in trainer.optimizers])
        self.note("metrics", dict(trainer.callback_metrics))
        self.note("progress", [trainer.global_step, trainer.current_epoch])

    def note_module(self, module: nn.Module) -> None:
        state = {name.replace("_orig_mod.", ""): value for name, value in module.state_dict().items()}
        self.note("weights", {name: value for name, value in state.items() if isinstance(value, Tensor)})
        self.note("layouts", [list(parameter.stride()) for parameter in module.parameters()])

    def note_gradients(self, module: nn.Module) -> None:
        """What gradients are now, and in which layout."""
        found = [parameter.grad for parameter in module.parameters()]
        self.steps.append(dict(flatten(found)))
        strided = [gradient for gradient in found if gradient is not None and gradient.layout is torch.strided]
        self.steps.append([list(gradient.stride()) for gradient in strided])


class Watcher(Callback):
    """Notes what hooks of a LightningModule can see: losses, gradients, learning rates, evaluation metrics."""

    def __init__(self, side: Side) -> None:
        self._side = side

    def on_after_backward(self, trainer: Trainer, module: LightningModule) -> None:
        self._side.note_gradients(module)

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        self._side.note_gradients(module)
        self._side.steps.append([group["lr"] for group in optimizer.param_groups])

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
        self._side.steps.append(dict(flatten(outputs)))
        self._side.steps.append(dict(flatten(dict(trainer.callback_metrics))))

    def on_validation_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._side.steps.append(dict(flatten(dict(trainer.callback_metrics))))


def ring(workload: Workload, cluster: ClusterSpec, *, bucket_bytes: int = 200) -> SyncPlan:
    """Small messages on rings, by our own sockets."""
    return builders.all_reduce(workload, cluster, topology="ring", bucket_bytes=bucket_bytes)


builders.register(takes_topology=False)(ring)
gc.freeze()  # what is imported stays; looking at it again for each job would take longer than the job
_RECORDS: dict[str, dict[str, Any]] = {}


def run(case: str, plan: str, folder: str) -> dict[str, Any]:
    """Run one job of a pair, and keep its record.

    Returns:
        ``error``: its type and text, empty if there was none; ``wrong``: whether a job's own assertion failed.
    """
    known = CASES | CONTROLS
    side = Side(known[case], plan, Path(folder))
    error, wrong = "", False
    _settle()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            known[case].run(side)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
            wrong = isinstance(caught, AssertionError) and not known[case].raises
    if plan == DDP:
        _RECORDS.clear()
    _RECORDS[plan] = dict(flatten({"notes": side.notes, "steps": side.steps}))
    return {"error": error, "wrong": wrong, "noted": len(_RECORDS[plan])}


def compare(plan: str) -> dict[str, Any]:
    """How far the last job under ``plan`` is from DDP's on this rank."""
    gap, where = difference(_RECORDS[DDP], _RECORDS[plan])
    return {"gap": min(gap, 1e30), "where": where}


def renew() -> None:
    """End in an error, so that the pool makes its process group anew."""
    raise RuntimeError("a new process group is wanted")


def _settle() -> None:
    """Every job begins in the same state."""
    gc.collect()
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)
    seed_everything(3, verbose=False)
    random.seed(3)
    numpy.random.seed(3)
