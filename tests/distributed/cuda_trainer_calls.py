"""What ranks do in tests of Trainers on accelerators; each function runs on the CPU too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hybrid.plans import draw_plan
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_autosync import AutoDDLStrategy, AutoSyncStrategy, ClusterSpec, SyncPlan, builders
from lightning_autosync.engine.due_parameter import due_of
from lightning_autosync.plan import Consistency
from lightning_autosync.workload import describe

FEATURES, CLASSES, SAMPLES, BATCH, SEED = 8, 4, 64, 4, 3
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
SCALE = 2.0**10
"""First loss scale: gradients do not overflow unless a step is poisoned."""


def data(dtype: torch.dtype) -> TensorDataset:
    """Samples that a linear model can learn to tell apart."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    labels = (inputs @ torch.randn(FEATURES, CLASSES, generator=generator, dtype=torch.float64)).argmax(dim=1)
    return TensorDataset(inputs.to(dtype), labels)


class Delay(torch.autograd.Function):
    """Passes values on. On a device, work on its stream ends a few milliseconds later than the host has issued it.

    What does not wait for the stream then reads values of the last step.
    """

    CYCLES = 10_000_000

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        Delay.wait(value)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        Delay.wait(gradients[0])
        return gradients[0].clone()

    @classmethod
    def wait(cls, value: Tensor) -> None:
        if value.is_cuda:
            torch.cuda._sleep(cls.CYCLES)  # type: ignore[no-untyped-call]


class Learner(LightningModule):
    """A small network.

    Args:
        kind: ``plain``; ``normed``: with running statistics; ``unused``: ranks leave out a layer in turn; ``thawed``: a
            layer trains from the third step on; ``poisoned``: rank 1's third loss is infinite; ``delayed``: the device
            is slower than the host; ``sides``: a layer runs on another stream of the device, which does not wait for
            the layer before it.
        momentum: of SGD.
    """

    def __init__(self, kind: str = "plain", momentum: float = 0.9, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.kind, self.momentum, self.type = kind, momentum, dtype
        self.body, self.extra, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.norm = nn.BatchNorm1d(8) if kind == "normed" else nn.Identity()
        self.extra.requires_grad_(kind != "thawed")
        self.to(dtype)
        self.losses: list[Tensor] = []
        self.overlapped = 0

    def forward(self, inputs: Tensor, leaves_out: bool = False) -> Tensor:
        features = torch.tanh(self.norm(self.body(inputs)))
        features = Delay.apply(features) if self.kind == "delayed" else features
        if self.kind == "sides":
            return self.on_two_streams(features)
        return self.head(features if leaves_out else features + torch.tanh(self.extra(features)))

    def on_two_streams(self, features: Tensor) -> Tensor:
        if not features.is_cuda:
            return self.head(features) + self.extra(features)[:, :CLASSES]
        usual, other = torch.cuda.current_stream(), torch.cuda.Stream()
        other.wait_stream(usual)
        Delay.wait(features)
        first = self.head(features)  # its step is made here, with that of the other layer, and runs after the delay
        with torch.cuda.stream(other):
            second = self.extra(features)[:, :CLASSES]
        usual.wait_stream(other)
        return first + second

    def on_train_batch_end(self, *_: Any) -> None:
        self.overlapped += some_due(self)

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if self.kind == "thawed" and index == 2:
            self.extra.requires_grad_(True)

    def training_step(self, batch: Any, index: int) -> Tensor:
        # In every third step no rank uses the layer.
        leaves_out = self.kind == "unused" and (index % 3 == 2 or (index + dist.get_rank()) % 2 == 1)
        loss = F.cross_entropy(self(batch[0], leaves_out).to(self.type), batch[1])
        self.losses.append(loss.detach())
        self.log("own", loss)
        return loss * float("inf") if self.kind == "poisoned" and (index, dist.get_rank()) == (2, 1) else loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", F.cross_entropy(self(batch[0]).to(self.type), batch[1]), sync_dist=True)

    def train_dataloader(self) -> Any:
        return DataLoader(data(self.type), batch_size=BATCH)

    val_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=self.momentum)


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])  # also before there is a process group


def some_due(module: nn.Module) -> bool:
    """Whether a step is due, so that it overlaps."""
    return any(due_of(parameter) is not None for parameter in module.parameters())


def make_plan(module: nn.Module, builder: str, consistency: dict[str, Any] | None = None, **options: Any) -> SyncPlan:
    plan = builders.build(builder, describe(module), ClusterSpec.uniform(nodes=world_size()), **options)
    return plan if consistency is None else plan.model_copy(update={"consistency": Consistency(**consistency)})


def make_strategy(module: nn.Module, name: str, plan: Any = None, mesh: Any = None, seed: int = 1, **more: Any) -> Any:
    if name == "ddp":
        return DDPStrategy(find_unused_parameters=True)
    if name == "autoddl":
        return AutoDDLStrategy(plan=draw_plan(module, mesh or [world_size()], seed), **more)
    if isinstance(plan, dict):
        plan, more = make_plan(module, **plan), {"semantics": "relaxed", **more}
    return AutoSyncStrategy(plan=plan, **more)


def make_trainer(device: str, strategy: Any, plugins: tuple[Any, ...] = (), **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu" if device == "cpu" else "gpu",
        devices=1,
        num_nodes=world_size(),
        plugins=[TorchElasticEnvironment(), *plugins],
        strategy=strategy,
        **{**QUIET, "max_epochs": 1, "limit_val_batches": 0, **options},  # type: ignore[arg-type]
    )


def weights(module: nn.Module) -> list[float]:
    """All parameters and buffers."""
    return [value for tensor in module.state_dict().values() for value in tensor.double().reshape(-1).tolist()]


def fitted(
    device: str, strategy: dict[str, Any], kind: str = "plain", momentum: float = 0.9, **options: Any
) -> Learner:
    seed_everything(SEED)
    module = Learner(kind, momentum)
    make_trainer(device, make_strategy(module, **strategy), **options).fit(module)
    return module


def trained(device: str, **arguments: Any) -> dict[str, Any]:
    """What training leads to: all weights, how far they moved, and by how much the mean loss has fallen.

    Also the number of steps after which some parameter's step was due.
    """
    module = fitted(device, **arguments)
    seed_everything(SEED)
    start = Learner(module.kind)
    losses = [float(loss) for loss in module.losses]
    third = len(losses) // 3
    return {
        "weights": weights(module),
        "moved": apart(weights(module), weights(start)),
        "fell": sum(losses[:third]) / third - sum(losses[-third:]) / third,
        "device": module.losses[-1].device.type,
        "overlapped": module.overlapped,
    }


def alone(device: str, kind: str = "plain") -> dict[str, Any]:
    """As `trained`, by one process on the CPU, whose batches have the samples of all ranks."""
    seed_everything(SEED)
    module = Learner(kind)
    optimizer: Any = module.configure_optimizers()
    # Lightning's sampler has this order, of which the ranks' batches together are consecutive parts.
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(SEED)).tolist()
    loader = DataLoader(data(torch.float64), batch_size=BATCH * dist.get_world_size(), sampler=order)
    for index, (inputs, labels) in enumerate(loader):
        module.on_train_batch_start(None, index)
        optimizer.zero_grad()
        F.cross_entropy(module(inputs), labels).backward()
        optimizer.step()
    return {"weights": weights(module)}


class Saving(Callback):
    """Saves at the end of the first epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.path)


def resumed(device: str, folder: str, strategy: dict[str, Any], momentum: float = 0.9) -> dict[str, float]:
    """How far two epochs at once end from one by one over a checkpoint, and what the second one changes."""
    path = Path(folder) / f"{device}.ckpt"
    whole = fitted(device, strategy, momentum=momentum, max_epochs=2)
    assert strategy.get("overlap") is None or whole.overlapped > 4
    half = fitted(device, strategy, momentum=momentum, callbacks=[Saving(path)])
    again = Learner(momentum=momentum)
    make_trainer(device, make_strategy(again, **strategy), max_epochs=2).fit(again, ckpt_path=path, weights_only=True)
    return {
        "resumed": apart(weights(whole), weights(again)),
        "second": apart(weights(whole), weights(half)),
    }


def apart(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def overflowing(device: str, strategy: dict[str, Any], first: float = SCALE, poisoned: bool = True) -> dict[str, Any]:
    """Training in half precision, of which a step on one rank overflows: weights, the scale, and the skipped steps."""
    seed_everything(SEED)
    module = Learner("poisoned" if poisoned else "plain", dtype=torch.float32)
    kind = "cpu" if device == "cpu" else "cuda"
    scaler = torch.amp.GradScaler(kind, init_scale=first, growth_interval=1000)
    precision = MixedPrecision("16-mixed", kind, scaler=scaler)
    make_trainer(device, make_strategy(module, **strategy), (precision,)).fit(module)
    return {"weights": weights(module), "scale": scaler.get_scale()}
