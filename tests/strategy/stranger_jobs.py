"""Jobs that train on while strangers connect to whatever they listen at."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from jobs import make_trainer
from lightning.pytorch import LightningModule, seed_everything
from models import Plain, loader
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_autosync import AutoSyncStrategy
from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan import Consistency, SyncPlan, builders
from lightning_autosync.strategy.job import STORE_PORT
from lightning_autosync.workload import describe

RANKS = int(os.environ.get("WORLD_SIZE", "1"))  # tests import this module, too, for the names of its functions


class Shares(DistributedSampler[Any]):
    """Of a type that is not dealt out, so that each rank has the same samples in every run."""


class Paced(Plain):
    """Begins a step once so many strangers have come; ``progress`` names a file with their number."""

    def __init__(self, progress: str, strangers: int, epochs: int, steps: int) -> None:
        super().__init__()
        self.progress, self.strangers, self.all_steps, self.an_epoch = Path(progress), strangers, epochs * steps, steps
        self.steps = 0

    def training_step(self, batch: Any, index: int) -> Tensor:
        awaited = self.strangers * self.steps // (self.all_steps - 1)  # all of them before the last
        self.steps += 1
        while int(self.progress.read_text() or 0) < awaited:
            time.sleep(0.02)
        return super().training_step(batch, index)

    def train_dataloader(self) -> DataLoader[Any]:
        data = loader(2 * self.an_epoch * RANKS).dataset
        rank = self.trainer.global_rank
        return DataLoader(data, batch_size=2, sampler=Shares(data, RANKS, rank, shuffle=False))


def train(kind: str, progress: str, strangers: int, epochs: int, steps: int, port: int = 0) -> dict[str, Any]:
    """Train by a plan of a kind, in the presence of so many strangers; a digest of this rank's weights.

    Args:
        progress: as for `Paced`.
        steps: of an epoch.
        port: where servers of their own process find the job.
    """
    seed_everything(3)
    module = Paced(progress, strangers, epochs, steps)
    arguments = {"devices": RANKS, "max_epochs": epochs, "use_distributed_sampler": False}
    with mock.patch.dict(os.environ, {STORE_PORT: str(port)} if port else {}):
        make_trainer(_strategy(kind, module), **arguments).fit(module)
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])
    return {
        "digest": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
        "weights": weights.tolist(),
        "steps": module.steps,
    }


def _strategy(kind: str, module: LightningModule) -> AutoSyncStrategy:
    cluster = ClusterSpec.uniform(nodes=1, devices=RANKS, name="this job")
    workload = describe(module)
    if kind == "exact":
        return AutoSyncStrategy(plan=builders.ps(workload, cluster))
    if kind == "partial reduce":
        base = builders.all_reduce(workload, cluster)
        consistency = Consistency(mode="partial_reduce", group_size=RANKS, weighting="constant")
        return AutoSyncStrategy(plan=base.model_copy(update={"consistency": consistency}), semantics="relaxed")
    names = [variable.name for variable in workload.variables]
    group = {"name": "all", "variables": names, "architecture": "parameter_server", "topology": "star"}
    plan = {
        "format": SyncPlan.FORMAT,
        "world_size": RANKS,
        "servers": 1,
        "consistency": {"mode": "synchronous", "served": True},
        "groups": [{**group, "placement": [RANKS]}],
    }
    return AutoSyncStrategy(plan=SyncPlan.from_dict(plan))
