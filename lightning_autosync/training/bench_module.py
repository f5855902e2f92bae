"""The bench's models as LightningModules, paced ones too."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_autosync.measure.models.models import Batch, Model


class BenchModule(L.LightningModule):
    """A bench model and its batches; logs ``loss``.

    Parameters have the names that they have in the bench, so that plans which were found there fit.

    Args:
        model: the recipe.
        world_size: ranks, each with batches of its own.
    """

    def __init__(self, model: Model, world_size: int) -> None:
        super().__init__()
        self._batches = _Batches(model, world_size)
        self._rate = model.learning_rate or 0.0
        inner = model.module()
        for name, child in inner.named_children():
            self.add_module(name, child)
        for name, parameter in inner.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        object.__setattr__(self, "_inner", inner)  # not as a child, which would prefix all names

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss: Tensor = self._inner(*batch)
        self.log("loss", loss.detach())
        return loss

    def train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self._batches, batch_size=None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self._rate)


class _Batches(Dataset[Batch]):
    """The batches of all ranks, one an item; a distributed sampler deals them out."""

    def __init__(self, model: Model, world_size: int) -> None:
        self._batches = [batch for rank in range(world_size) for batch in model.batches(rank)]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Batch:
        return self._batches[index]
