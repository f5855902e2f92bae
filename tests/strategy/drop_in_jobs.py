"""What ranks do in tests of what users rely on beside the weights: the same job under DDP and under AutoSync."""

from __future__ import annotations

from typing import Any

import models
import torch
import torch.distributed as dist
from jobs import make_trainer
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader

from lightning_autosync import AutoSyncFabricStrategy, AutoSyncStrategy

STRATEGIES = {"ddp": DDPStrategy, "autosync": AutoSyncStrategy}


class Records(models.Plain):
    """Notes what it sees of itself; each rank begins with buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("mark", torch.full((2,), float(dist.get_rank())))
        self.seen: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.body(inputs))))

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.seen.append(float(self.mark[0]))
        self.seen.append(float(self.norm.running_mean.sum()))
        self.mark += 1.0 + dist.get_rank()
        return super().training_step(batch, index)

    def validation_step(self, batch: Any, index: int) -> None:
        inputs, labels = batch
        self.seen.append(float(self.mark[0]))
        self.seen.append(float(F.cross_entropy(self(inputs), labels)))

    def val_dataloader(self) -> DataLoader:
        return models.loader(samples=16)


class Manual(Records):
    """Steps in every other batch only."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        loss = super().training_step(batch, index)
        if index % 2:
            return
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Accumulates(Manual):
    """Accumulates by the wrapper's own means, in both ways that DDP has."""

    def training_step(self, batch: Any, index: int) -> None:
        optimizer, wrapper = self.optimizers(), self.trainer.model
        assert wrapper.module is self
        loss = Records.training_step(self, batch, index)
        if index % 3 == 0:
            with wrapper.no_sync():
                self.manual_backward(loss)
        elif index % 3 == 1:
            wrapper.require_backward_grad_sync = False
            self.manual_backward(loss)
            wrapper.require_backward_grad_sync = True
        else:
            self.manual_backward(loss)
        self.seen.append(float(self.head.weight.grad.sum()))
        if index % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


class Hooked(Records):
    """Counts the calls of hooks that users put on the whole module."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda module, inputs: self.seen.append(1000.0))
        self.register_forward_hook(lambda module, inputs, output: self.seen.append(2000.0))


class Ignoring(Records):
    """A parameter and a buffer that are each rank's own, of a size of its own."""

    _ddp_params_and_buffers_to_ignore = ("own.weight", "own.bias", "mark")

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(8, 2 + dist.get_rank())
        with torch.no_grad():
            self.own.weight.fill_(0.1 * (1 + dist.get_rank()))
            self.own.bias.zero_()

    def training_step(self, batch: Any, index: int) -> Tensor:
        inputs, _ = batch
        return super().training_step(batch, index) + self.own(torch.tanh(self.body(inputs))).square().mean()


def run(job: str, strategy: str, average: bool = False, **options: Any) -> list[float]:
    """What a job has seen, and then the sums of its weights and buffers, of which nothing must depend on the strategy.

    Args:
        average: whether validation is of averaged weights.
        options: arguments of the strategy.
    """
    seed_everything(3)
    module = globals()[job]()
    callbacks = [WeightAveraging(avg_fn=get_ema_avg_fn(0.5))] if average else []
    make_trainer(STRATEGIES[strategy](**options), callbacks=callbacks, num_sanity_val_steps=1).fit(module)
    ends = [float(tensor.double().sum()) for tensor in module.state_dict().values()]
    return [*module.seen, *ends]


def run_fabric(strategy: str) -> list[float]:
    """Forward passes in training, evaluation and without gradients, in turn: what a module sees of its buffer."""
    seed_everything(3)
    made = {"ddp": FabricDDP, "autosync": AutoSyncFabricStrategy}[strategy]()
    fabric = Fabric(accelerator="cpu", devices=2, strategy=made, plugins=[TorchElasticEnvironment()])
    fabric.launch()
    inner = Records()
    module, optimizer = fabric.setup(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    inputs = torch.randn(4, models.FEATURES)

    def forward() -> Tensor:
        inner.seen.append(0.0)
        found: Tensor = module(inputs)
        inner.seen.extend([float(inner.mark[0]), float(found.detach().sum())])
        inner.mark += 1.0 + dist.get_rank()
        return found

    for turn in range(3):
        with fabric.no_backward_sync(module):
            fabric.backward(forward().square().sum())
        fabric.backward(forward().square().sum())
        optimizer.step()
        optimizer.zero_grad()
        module.eval()
        if turn % 2:
            forward().sum().backward()
            optimizer.zero_grad()
        with torch.no_grad():
            forward()
            forward()
        module.train()
    return inner.seen
