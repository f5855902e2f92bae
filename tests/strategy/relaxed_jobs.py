"""What ranks do in tests of relaxed plans under the Trainer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jobs import distance, make_trainer, state
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_autosync import AutoSyncStrategy, SyncPlan
from lightning_autosync.plan import Consistency, builders
from lightning_autosync.runtime.rendezvous import gather_json

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
        running: bool = False,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)]
        if norm:
            layers.insert(1, nn.SyncBatchNorm(8))
        if running:
            layers.insert(1, nn.BatchNorm1d(8, momentum=None))
        self.layers = nn.Sequential(*layers)
        self.slow, self.how, self.momentum, self.thaw = slow, log, momentum, thaw
        self.layers[0].bias.requires_grad_(not thaw)
        self.seen: list[list[int]] = []
        self.validated: list[list[float]] = []

    def on_train_epoch_start(self) -> None:
        self.seen.append([])
        if self.thaw and self.current_epoch == 1:
            self.layers[0].bias.requires_grad_(True)

    def training_step(self, batch: Any, _: int) -> Tensor:
        inputs, targets, indices = batch
        self.seen[-1] += indices.tolist()
        if self.global_rank == 1:
            time.sleep(self.slow)
        loss = F.mse_loss(self.layers(inputs), targets)
        if self.how == "step":
            self.log("loss", loss, sync_dist=True, on_step=True)
        elif self.how == "epoch":
            self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        self.validated.append([])

    def validation_step(self, batch: Any, _: int) -> None:
        inputs, targets, _ = batch
        self.validated[-1].append(float(F.mse_loss(self.layers(inputs), targets)))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.02, momentum=self.momentum)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def loader(count: int = SAMPLES, shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(Points(count), batch_size=4, shuffle=shuffle)


def plan_of(consistency: dict[str, Any], module: nn.Module) -> SyncPlan:
    from lightning_autosync.cluster import ClusterSpec
    from lightning_autosync.workload import describe

    cluster = ClusterSpec.uniform(nodes=1, devices=2, name="this job")
    base = builders.byteps(describe(module), cluster)
    return base.model_copy(update={"consistency": Consistency(**consistency)})


def fit(strategy: Any, learner: dict[str, Any] | None = None, **arguments: Any) -> Learner:
    seed_everything(5)
    module = Learner(**(learner or {}))
    resume = arguments.pop("resume", None)
    count = arguments.pop("samples", SAMPLES)
    train: Any = {"one": loader(), "other": loader()} if arguments.pop("two_loaders", False) else loader(count)
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
        "first": sum(module.validated[0]),
        "last": sum(module.validated[-1]),
        "finite": bool(flat.isfinite().all()),
    }


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


def resume_drifting(folder: str, consistency: dict[str, Any] | str) -> dict[str, Any]:
    """As `train`, the last of it resumed; the first validation loss is that of the beginning."""
    half = checkpoint(folder, consistency, {})
    begun = report(fit(relaxed(consistency), max_epochs=1))
    return report(fit(relaxed(consistency), max_epochs=8, resume=half)) | {"first": begun["first"]}


def checkpoint(folder: str, consistency: dict[str, Any] | str, learner: dict[str, Any]) -> str:
    """The checkpoint of a training of two epochs; it loads without pickled code."""
    keep = ModelCheckpoint(folder, filename="half", every_n_epochs=1)
    fit(relaxed(consistency), learner, max_epochs=2, enable_checkpointing=True, callbacks=[keep])
    torch.load(Path(folder) / "half.ckpt", weights_only=True)
    return str(Path(folder) / "half.ckpt")


def attempt(consistency: dict[str, Any] | str, learner: dict[str, Any] | None = None, **arguments: Any) -> str:
    """The error of a training."""
    try:
        fit(relaxed(consistency), learner, **arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
