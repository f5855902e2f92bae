"""Modules and data that cases are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from models import CLASSES, FEATURES, loader
from torch import Tensor, nn
from torch.nn import functional as F

HIDDEN = 8


def mlp(*middle: nn.Module) -> nn.Sequential:
    """Two layers; whatever comes in between takes and gives [batch, HIDDEN]."""
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), *middle, nn.Linear(HIDDEN, CLASSES))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


class Task(LightningModule):
    """Classifies; logs its loss in training and in evaluation.

    Args:
        net: [batch, FEATURES] to [batch, CLASSES].
        optimizer: makes one of all parameters.
        samples: in each loader.
    """

    def __init__(
        self, net: nn.Module | None = None, optimizer: Callable[[Any], Any] = sgd, samples: int = 16, batch: int = 2
    ) -> None:
        super().__init__()
        self.net = mlp() if net is None else net
        self.make_optimizer = optimizer
        self.samples, self.batch = samples, batch

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]).float(), batch[1])

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> Any:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, index: int) -> Any:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())

    def train_dataloader(self) -> Any:
        return loader(self.samples, self.batch)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class ByHand(Task):
    """Manual optimization: ``step`` does all of a training step."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> Any:
        raise NotImplementedError
