"""The model and data of the examples: a CNN on scikit-learn's 1,797 handwritten digits."""

from __future__ import annotations

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

HELD_OUT = 360


class Digits(L.LightningModule):
    """A small CNN; logs the validation accuracy as ``val_accuracy``."""

    def __init__(self, learning_rate: float = 0.05) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.fc = nn.Linear(1024, 256)
        self.head = nn.Linear(256, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(F.relu(self.fc(self.features(images))))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        accuracy = (self(images).argmax(dim=1) == labels).float().mean()
        self.log("val_accuracy", accuracy, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=0.9)


class WideDigits(Digits):
    """The same task for wide layers: 9 MB of weights, which are large beside the activations of a batch."""

    def __init__(self, learning_rate: float = 0.05) -> None:
        super().__init__(learning_rate)
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(64, 2048), nn.ReLU())
        self.fc = nn.Linear(2048, 1024)
        self.head = nn.Linear(1024, 10)


def loaders(batch_size: int = 32) -> tuple[DataLoader, DataLoader]:
    """Training and validation batches, in a fixed random split."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    training, held_out = order[HELD_OUT:], order[:HELD_OUT]
    return (
        DataLoader(TensorDataset(images[training], labels[training]), batch_size, shuffle=True, drop_last=True),
        DataLoader(TensorDataset(images[held_out], labels[held_out]), batch_size),
    )


class DigitsData(L.LightningDataModule):
    """The same batches for LightningCLI and Hydra, which make a data module from a configuration."""

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.training, self.validation = loaders(batch_size)

    def train_dataloader(self) -> DataLoader:
        return self.training

    def val_dataloader(self) -> DataLoader:
        return self.validation
