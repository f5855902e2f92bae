"""What ranks do in tests of how `AutoDDLStrategy` sets a model up, beside DDP."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import LayerSync
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from hybrid.jobs import Wide, make_trainer
from lightning_autosync import AutoDDLStrategy


class Replaces(LayerSync):
    """Replaces a layer by another, as ``sync_batchnorm=True`` does on GPUs."""

    def apply(self, model: Any) -> Any:
        model.act = nn.Tanh()
        return model

    def revert(self, model: Any) -> Any:
        model.act = nn.ReLU()
        return model


class Sees(Wide):
    """Notes the kind of its layer, and what its weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[str] = []
        self.sums: list[float] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.kinds.append(type(self.act).__name__)
        return super().training_step(batch, index)

    def validation_step(self, batch: Any, index: int) -> None:
        self.sums.append(float(sum(parameter.detach().sum() for parameter in self.parameters())))

    val_dataloader = Wide.train_dataloader


def _strategy(ddp: bool) -> Any:
    return DDPStrategy() if ddp else AutoDDLStrategy()


def replaced_layers(ddp: bool) -> dict[str, Any]:
    """The kinds of a layer while it trains and afterwards, and the sum of the trained weights."""
    torch.manual_seed(3)
    job = Sees()
    make_trainer(_strategy(ddp), plugins=[TorchElasticEnvironment(), Replaces()]).fit(job)
    whole = float(sum(parameter.detach().double().sum() for parameter in job.parameters()))
    return {"kinds": job.kinds, "after": type(job.act).__name__, "weights": round(whole, 4)}


def evaluated_weights(ddp: bool) -> list[float]:
    """The sums of weights that a rank evaluates, if each has drawn its own."""
    torch.manual_seed(dist.get_rank())
    job = Sees()
    make_trainer(_strategy(ddp), limit_val_batches=2).validate(job, verbose=False)
    return job.sums
