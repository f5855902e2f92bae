"""Modules that the tests of ``autosync bench`` train by name."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SHAPE = (16, 3, 8, 8)


class Normalized(nn.Module):
    """Batch normalization, whose buffers change with every forward pass, and dropout; its output is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5))

    def forward(self, images: Tensor) -> Tensor:
        return self.parts(images).square().mean()


def batches() -> list[tuple[Tensor]]:
    """Two batches, the same each time."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(SHAPE, generator=generator),) for _ in range(2)]


def running_means(names: list[str]) -> list[list[float]]:
    """The running mean of each contender on this worker."""
    from lightning_autosync.measure.replica_calls import _live

    return [_live[name].module.get_buffer("parts.1.running_mean").tolist() for name in names]


def fails() -> None:
    raise ZeroDivisionError
