"""What ranks do in tests of relaxed plans under the Trainer."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from jobs import distance, make_trainer, state
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import Callback, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner.lr_finder import _lr_find
from models import one_cycle
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler
from torchmetrics import MeanMetric

from lightning_autosync import AutoSyncStrategy, SyncPlan
from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.plan import Consistency, Group, builders
from lightning_autosync.relaxed.server.client import ParameterServer
from lightning_autosync.relaxed.transport.mesh import Mesh
from lightning_autosync.strategy.job import STORE_PORT
from lightning_autosync.strategy.relaxed import AVERAGING

SAMPLES = 48


class Points(Dataset[tuple[Tensor, Tensor, int]]):
    """Points on a noisy plane, each with its number; the first ``count`` of them."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.count = count
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(SAMPLES, 6, generator=generator)
        self.targets = self.inputs @ torch.arange(6.0)[:, None] + torch.randn(SAMPLES, 1, generator=generator)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.inputs[index], self.targets[index], index


class Learner(LightningModule):
    """A small network that notes which samples it saw, and may be slow on one rank."""

    def __init__(
        self,
        slow: float = 0.0,
        log: str = "",
        momentum: float = 0.0,
        norm: bool = False,
        thaw: bool = False,
        replace: bool = False,
        convert: bool = False,
        running: bool = False,
        late: float = 0.0,
        adam: bool = False,
        plateau: bool = False,
        cycle: bool = False,
        lbfgs: bool = False,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)]
        if norm:
            layers.insert(1, nn.SyncBatchNorm(8))
        if running:
            layers.insert(1, nn.BatchNorm1d(8, momentum=None))
        self.layers = nn.Sequential(*layers)
        self.slow, self.how, self.momentum, self.thaw, self.replace = slow, log, momentum, thaw, replace
        self.convert = convert
        self.late, self.adam, self.plateau, self.cycle, self.lbfgs = late, adam, plateau, cycle, lbfgs
        self.automatic_optimization = log not in ("manual", "raw")
        self.layers[0].bias.requires_grad_(not thaw)
        self.metric = MeanMetric(dist_sync_on_step=True)
        self.counts: dict[str, Any] = {}
        self.own_steps = 0
        self.seen: list[list[int]] = []
        self.validated: list[list[float]] = []

    def on_train_epoch_start(self) -> None:
        self.seen.append([])
        if self.global_rank == 1:
            time.sleep(self.late)
        if self.how == "everywhere":
            self.trainer.strategy.barrier("the start of an epoch")
        if self.thaw and self.current_epoch == 1:
            self.layers[0].bias.requires_grad_(True)
        if self.convert and self.current_epoch == 1:
            self.layers[0].double()
        if self.replace and self.current_epoch == 1:
            self.layers[0].bias = nn.Parameter(torch.zeros(8))

    def training_step(self, batch: Any, _: int) -> Tensor:
        inputs, targets, indices = batch
        self.own_steps += 1
        self.seen[-1] += indices.tolist()
        if self.global_rank == 1:
            time.sleep(self.slow)
        loss = F.mse_loss(self.layers(inputs), targets)
        if self.how == "step":
            self.log("loss", loss, sync_dist=True, on_step=True)
        elif self.how in ("epoch", "everywhere"):
            self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        elif self.how == "own":
            dist.all_reduce(torch.ones(1))
        elif self.how == "metric":
            self.metric(loss.detach())
        elif self.how == "manual":
            self.step_by_hand(loss)
            self.log("loss", loss.detach(), sync_dist=True, on_step=True)
        elif self.how == "raw":
            self.step_by_hand(loss, raw=True)
        return loss

    def step_by_hand(self, loss: Tensor, raw: bool = False) -> None:
        optimizer: Any = self.optimizers(use_pl_optimizer=not raw)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.how == "end of batch":
            self.log("late", 1.0, sync_dist=True)
        elif self.how == "own, after":
            dist.all_reduce(torch.ones(1))
        elif self.how == "checkpoint":
            self.trainer.save_checkpoint("never.ckpt")

    def on_train_epoch_end(self) -> None:
        if self.how == "everywhere":
            self.trainer.strategy.barrier("the end of an epoch")

    def on_train_end(self) -> None:
        schedulers: Any = self.lr_schedulers()
        strategy: Any = self.trainer.strategy
        if isinstance(strategy, AutoSyncStrategy):
            progress = strategy._replica._synchronizer.progress
            self.counts = {"scheduler": schedulers.last_epoch, "progress": progress, "own": self.own_steps}
            self.counts["global"] = self.global_step
            self.counts |= {"rates": schedulers.get_last_lr(), "total": getattr(schedulers, "total_steps", None)}

    def on_validation_start(self) -> None:
        if self.how == "everywhere":
            self.trainer.strategy.barrier("the start of validation")

    def on_validation_epoch_start(self) -> None:
        self.validated.append([])

    def validation_step(self, batch: Any, _: int) -> None:
        inputs, targets, _ = batch
        self.validated[-1].append(float(F.mse_loss(self.layers(inputs), targets)))
        if self.how in ("everywhere", "scores"):
            self.log("score", self.validated[-1][-1], sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(self.parameters(), 0.02, momentum=self.momentum)
        if self.adam:
            optimizer = torch.optim.Adam(self.parameters(), 0.02)
        if self.lbfgs:
            optimizer = torch.optim.LBFGS(self.parameters(), 0.02)
        scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
        if self.cycle:
            scheduler = one_cycle(optimizer, self.trainer.estimated_stepping_batches)
        if self.plateau:
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return [optimizer], [{"scheduler": scheduler, "interval": "step", "monitor": "loss", "strict": False}]
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def loader(count: int = SAMPLES, shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(Points(count), batch_size=4, shuffle=shuffle)


def plan_of(consistency: dict[str, Any], module: nn.Module) -> SyncPlan:
    from lightning_autosync.cluster import ClusterSpec
    from lightning_autosync.workload import describe

    cluster = ClusterSpec.uniform(nodes=1, devices=2, name="this job")
    averages = consistency["mode"] in AVERAGING
    base = (builders.all_reduce if averages else builders.byteps)(describe(module), cluster)
    return base.model_copy(update={"consistency": Consistency(**consistency)})


def fit(strategy: Any, learner: dict[str, Any] | None = None, **arguments: Any) -> Learner:
    seed_everything(5)
    module = Learner(**(learner or {}))
    resume = arguments.pop("resume", None)
    count = arguments.pop("samples", SAMPLES)
    train: Any = {"one": loader(), "other": loader()} if arguments.pop("two_loaders", False) else loader(count)
    if arguments.pop("weighted", False):
        train = DataLoader(Points(), batch_size=4, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES))
    make_trainer(strategy, **arguments).fit(module, train, loader(shuffle=False), ckpt_path=resume)
    return module


def relaxed(consistency: dict[str, Any] | str, module: nn.Module | None = None) -> AutoSyncStrategy:
    plan = consistency if isinstance(consistency, str) else plan_of(consistency, module or Learner())
    return AutoSyncStrategy(plan=plan, semantics="relaxed")


def train(consistency: dict[str, Any] | str, learner: dict[str, Any] | None = None, **arguments: Any) -> dict[str, Any]:
    """Train under a relaxed plan; how far the ranks ended apart, what they saw, and the last validation losses."""
    return report(fit(relaxed(consistency), learner, **arguments))


def report(module: Learner) -> dict[str, Any]:
    """How far the ranks are apart, what they saw, and sums of validation losses."""
    flat = torch.cat([tensor.reshape(-1) for tensor in state(module).values()])
    low, high = flat.clone(), flat.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return {
        "apart": float((high - low).max()),
        "seen": gather_json(module.seen),
        "validations": gather_json(len(module.validated)),
        "counts": gather_json(module.counts),
        "first": sum(module.validated[0]),
        "last": sum(module.validated[-1]),
        "finite": bool(flat.isfinite().all()),
    }


def warned(**arguments: Any) -> list[str]:
    """The warnings of a training."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(**{"strategy": relaxed("partial_reduce"), "max_epochs": 1, **arguments})
    return [str(each.message) for each in caught]


def against_ddp(consistency: dict[str, Any], accumulated: int = 1, **learner: Any) -> float:
    """How far a plan that changes nothing but the way ends from DDP, buffers included."""
    arguments = {"max_epochs": 2, "accumulate_grad_batches": accumulated}
    ours = fit(relaxed(consistency, Learner(**learner)), learner, **arguments)
    return distance(ours, fit(DDPStrategy(), learner, **arguments))


def resume(folder: str, consistency: dict[str, Any] | str, momentum: float) -> float:
    """How far two epochs at a stretch and two with a checkpoint between them end from each other."""
    learner = {"momentum": momentum}
    whole = fit(relaxed(consistency), learner, max_epochs=4)
    half = checkpoint(folder, consistency, learner)
    return distance(whole, fit(relaxed(consistency), learner, max_epochs=4, resume=half))


def resume_as(folder: str, first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any]:
    """How far two epochs under one plan and two more under another end from four by DDP; None stands for DDP."""
    learner = {"adam": True}
    half = checkpoint(folder, first, learner)
    ours, theirs = (
        fit(strategy_of(second), learner, max_epochs=4, resume=half),
        fit(DDPStrategy(), learner, max_epochs=4),
    )
    return {"distance": distance(ours, theirs), "steps": [ours.trainer.global_step, theirs.trainer.global_step]}


def resume_old(folder: str) -> str:
    """The error where a checkpoint's entry is of another version."""
    path = checkpoint(folder, "partial_reduce", {})
    content = torch.load(path, weights_only=True)
    content["autosync"]["format"] = "autosync-relaxed/1"
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save(content, path)
    dist.barrier()
    return attempt("partial_reduce", max_epochs=3, resume=path)


def everywhere(folder: str, consistency: dict[str, Any]) -> dict[str, Any]:
    """Train with reductions and barriers wherever all ranks come, and a checkpoint of the best epochs."""
    best = ModelCheckpoint(folder, monitor="score", save_top_k=2, every_n_epochs=1)
    arguments = {"max_epochs": 4, "check_val_every_n_epoch": 2, "enable_checkpointing": True, "callbacks": [best]}
    found = report(fit(relaxed(consistency), {"log": "everywhere", "slow": 0.01}, **arguments))
    return found | {"kept": len(best.best_k_models)}


def inside(folder: str, consistency: dict[str, Any]) -> dict[str, Any]:
    """Train with validation and the best checkpoints after so many steps, within epochs of six."""
    best = ModelCheckpoint(folder, monitor="score", save_top_k=2, every_n_train_steps=2)
    arguments = {"max_epochs": 2, "val_check_interval": 3, "enable_checkpointing": True, "callbacks": [best]}
    found = report(fit(relaxed(consistency), {"log": "scores"}, **arguments))
    return found | {"kept": len(best.best_k_models)}


def steps_with_a_late_start(consistency: dict[str, Any]) -> list[list[int]]:
    """``trainer.global_step`` of each rank at its validations; one rank begins when the other has stepped."""
    steps: list[int] = []
    started = ParameterServer.start

    def start(client: ParameterServer) -> None:
        if client._mesh.rank == 1:
            time.sleep(0.5)
        started(client)

    class Counting(Callback):
        def on_validation_end(self, trainer: Any, _: Any) -> None:
            steps.append(trainer.global_step)

    with mock.patch.object(ParameterServer, "start", start):
        fit(relaxed(consistency), max_epochs=2, val_check_interval=3, callbacks=[Counting()])
    return gather_json(steps)


def patience() -> dict[str, float]:
    """What of a strategy's time-outs reaches the mesh and the averages of groups."""
    seen: dict[str, float] = {}
    opened = Mesh.open

    def open_and_note(*arguments: Any, **options: Any) -> Mesh:
        seen["longest"], seen["interval"] = options["heartbeat"].longest, options["heartbeat"].interval
        return opened(*arguments, **options)

    class Watched(Learner):
        def on_train_epoch_start(self) -> None:
            super().on_train_epoch_start()
            seen["stall"] = self.trainer.strategy._replica._synchronizer._average._timeout

    strategy = AutoSyncStrategy(
        plan="partial_reduce", semantics="relaxed", heartbeat={"longest": 33.0, "interval": 0.25}, stall=17
    )
    with mock.patch.object(Mesh, "open", open_and_note):
        seed_everything(5)
        make_trainer(strategy, max_epochs=1).fit(Watched(), loader())
    return seen


def against_ddp_by_a_server(port: int, secret: str) -> float:
    """How far a training whose parameters lie on one process of ``autosync serve`` ends from DDP."""
    names = tuple(name for name, _ in Learner().named_parameters())
    group = Group(name="all", variables=names, architecture="parameter_server", topology="star", placement=(2,))
    plan = SyncPlan(world_size=2, servers=1, consistency=Consistency(served=True), groups=(group,))
    with mock.patch.dict(os.environ, {STORE_PORT: str(port), "AUTOSYNC_SECRET": secret}):
        ours = fit(AutoSyncStrategy(plan=plan), {"momentum": 0.9}, max_epochs=2)
    return distance(ours, fit(DDPStrategy(), {"momentum": 0.9}, max_epochs=2))


def resume_drifting(folder: str, consistency: dict[str, Any] | str) -> dict[str, Any]:
    """As `train`, the last of it resumed; the first validation loss is that of the beginning."""
    half = checkpoint(folder, consistency, {})
    begun = report(fit(relaxed(consistency), max_epochs=1))
    return report(fit(relaxed(consistency), max_epochs=8, resume=half)) | {"first": begun["first"]}


def position(strategy: AutoSyncStrategy) -> tuple[int, list[Tensor]]:
    """Progress and momenta of this rank."""
    momenta = [state["momentum_buffer"].clone() for state in strategy.optimizers[0].state.values()]
    return strategy._replica._synchronizer.progress, momenta


def resume_positions(folder: str, consistency: dict[str, Any]) -> dict[str, Any]:
    """Progress at a checkpoint and after resuming, and whether momenta are then those kept and those of all ranks."""
    found: list[tuple[int, list[Tensor]]] = []

    class Ends(Callback):
        def on_train_end(self, trainer: Any, _: Any) -> None:
            found.append(position(trainer.strategy))

    class Begins(Callback):
        def on_train_epoch_start(self, trainer: Any, _: Any) -> None:
            found.append(position(trainer.strategy))

    learner = {"momentum": 0.9, "slow": 0.01}
    half = checkpoint(folder, consistency, learner, Ends())
    fit(relaxed(consistency), learner, max_epochs=3, resume=half, callbacks=[Begins()])
    (saved, kept), (begun, given) = found
    sums = gather_json([float(tensor.double().sum()) for tensor in given])
    return {"progress": (saved, begun), "kept": all(map(torch.equal, kept, given)), "alike": sums[0] == sums[1]}


def strategy_of(consistency: dict[str, Any] | str | None) -> DDPStrategy:
    return DDPStrategy() if consistency is None else relaxed(consistency)


def checkpoint(
    folder: str, consistency: dict[str, Any] | str | None, learner: dict[str, Any], *callbacks: Callback
) -> str:
    """The checkpoint of a training of two epochs; it loads without pickled code."""
    keep = ModelCheckpoint(folder, filename="half", every_n_epochs=1)
    fit(strategy_of(consistency), learner, max_epochs=2, enable_checkpointing=True, callbacks=[keep, *callbacks])
    torch.load(Path(folder) / "half.ckpt", weights_only=True)
    return str(Path(folder) / "half.ckpt")


def search_rate(consistency: dict[str, Any] | str, own: bool) -> str:
    """The error of training in which a learning rate is searched first, within ``fit``.

    Args:
        consistency: the plan's consistency.
        own: whether a callback of the user does that, not Lightning's.
    """

    class Searches(Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            _lr_find(trainer, module, num_training=6, early_stop_threshold=None)

    finder = LearningRateFinder(num_training_steps=6, early_stop_threshold=None, attr_name="momentum")
    return attempt(consistency, callbacks=[Searches() if own else finder])


def attempt(consistency: dict[str, Any] | str, learner: dict[str, Any] | None = None, **arguments: Any) -> str:
    """The error of a training."""
    try:
        fit(relaxed(consistency), learner, **arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
