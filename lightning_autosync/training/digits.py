"""The default training of ``autosync train``: a small CNN on scikit-learn's 1,797 handwritten digits."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_autosync.measure.models.digits import load_digits

HELD_OUT = 360
"""Number of images for validation only."""


class DigitsClassifier(L.LightningModule):
    """Two convolutions and two linear layers; logs ``loss``, ``val_loss`` and ``val_accuracy``.

    Args:
        channels: output channels of the first convolution.
        learning_rate: learning rate of SGD with momentum 0.9.
    """

    def __init__(self, channels: int = 16, learning_rate: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.features = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.head = nn.Sequential(nn.Linear(32 * channels, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Logits [batch, 10] of images [batch, 1, 8, 8]."""
        logits: Tensor = self.head(self.features(images))
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        accuracy = (logits.argmax(dim=1) == labels).float().mean()
        self.log("val_loss", F.cross_entropy(logits, labels), sync_dist=True)
        self.log("val_accuracy", accuracy, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=0.9)


class Digits(L.LightningDataModule):
    """Images [1, 8, 8] with values from 0 to 1 and their labels, in a fixed random split.

    Args:
        batch_size: images per batch and rank.
    """

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self._batch_size = batch_size

    def setup(self, stage: str) -> None:
        images, labels = load_digits()
        request = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        training, held_out = request[HELD_OUT:], request[:HELD_OUT]
        self._training = TensorDataset(images[training], labels[training])
        self._held_out = TensorDataset(images[held_out], labels[held_out])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self._training, self._batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self._held_out, self._batch_size)
