"""What ranks do in tests that train to an accuracy: a CNN on scikit-learn's digits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from training import engine, subgroup

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan import SyncPlan

HELD_OUT = 360


def digits() -> tuple[Tensor, Tensor]:
    """Images [1797, 1, 8, 8] in 0 to 1, and labels; in a fixed random order."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32)[order, None] / 16
    return images, torch.tensor(data.target)[order]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def accuracies(plans: list[dict[str, Any]], cluster: dict[str, Any], epochs: int) -> list[tuple[float, float]] | None:
    """For each plan, held-out accuracy after training by it, and how far this rank's weights are from rank 0's."""
    size = plans[0]["world_size"]
    group = subgroup(size)
    if group is None:
        return None
    images, labels = digits()
    results = []
    for plan in plans:
        module = network()
        with engine(module, SyncPlan.from_dict(plan), ClusterSpec.from_dict(cluster), group):
            _train(module, images[HELD_OUT:], labels[HELD_OUT:], dist.get_rank(group), size, epochs)
        with torch.no_grad():
            found = module(images[:HELD_OUT]).argmax(dim=1)
        weights = torch.cat([parameter.detach().view(-1) for parameter in module.parameters()])
        first = weights.clone()
        dist.broadcast(first, 0, group=group)
        results.append((float((found == labels[:HELD_OUT]).float().mean()), float((weights - first).abs().max())))
    return results


def _train(module: nn.Module, images: Tensor, labels: Tensor, rank: int, size: int, epochs: int) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.15, momentum=0.9)
    batch = 16 * size
    # Ending at a small rate keeps the last steps' noise out of the accuracy.
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * (len(images) // batch))
    for epoch in range(epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for start in range(0, len(images) - batch + 1, batch):
            chosen = order[start : start + batch][rank::size]
            nn.functional.cross_entropy(module(images[chosen]), labels[chosen]).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
