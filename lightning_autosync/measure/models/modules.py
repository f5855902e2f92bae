"""The real modules among the models of a bench; each returns its loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class ResidualLayers(nn.Module):
    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = inputs
        for layer in self.layers:
            hidden = hidden + torch.relu(layer(hidden))
        return F.mse_loss(F.layer_norm(hidden, hidden.shape[1:]), targets)


class EmbeddingRecommender(nn.Module):
    def __init__(self, rows: int, width: int, sparse: bool) -> None:
        super().__init__()
        self.items = nn.Embedding(rows, width, sparse=sparse)
        self.head = nn.Sequential(nn.Linear(2 * width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, pairs: Tensor, ratings: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.items(pairs).flatten(1))[:, 0], ratings)


class FlatVector(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(numel))

    def forward(self, scale: Tensor) -> Tensor:
        return _ConstantGradient.apply(self.vector, scale)


class _ConstantGradient(torch.autograd.Function):
    """Zero, with ``scale`` as the derivative by every element."""

    @staticmethod
    def forward(context: Any, vector: Tensor, scale: Tensor) -> Tensor:
        context.save_for_backward(scale)
        context.shape = vector.shape
        return vector.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(context: Any, output: Tensor) -> tuple[Tensor, None]:
        (scale,) = context.saved_tensors
        return scale.expand(context.shape).contiguous(), None


class DigitsNetwork(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, padding=1, stride=2),
            nn.ReLU(),
        )
        self.head = nn.Sequential(nn.Linear(2 * channels * 16, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.features(images).flatten(1)), labels)
