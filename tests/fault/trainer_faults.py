"""What the processes of a `crew.Crew` do in fault tests of partial reduce under a Trainer."""

from __future__ import annotations

import hashlib
import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from averaging_faults import HEARTBEAT
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autosync import AutoSyncStrategy

VICTIM = 2
STRUCK = 8
"""Steps after which the victim waits for what the test does to it."""


class Trained(LightningModule):
    """A linear model of which one rank stands still in the middle of a step."""

    def __init__(self, store: dist.Store, asks: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.store, self.asks, self.steps = store, asks, 0

    def training_step(self, batch: Any, _: int) -> Tensor:
        self.steps += 1
        if self.global_rank == VICTIM and self.steps == STRUCK:
            self.store.add("struck", 1)
            time.sleep(600.0)
        time.sleep(0.01)
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("score", self.layer(batch[0]).square().mean(), sync_dist=self.asks)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def train(store: dist.Store, rank: int, size: int, rejoin: bool, port: int, asks: bool) -> dict[str, Any]:
    """Train two epochs; ``asks`` is whether validation asks all ranks."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    strategy = AutoSyncStrategy(
        plan="partial_reduce", semantics="relaxed", heartbeat=HEARTBEAT, stall=20, timeout=timedelta(seconds=90)
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=size,
        plugins=[TorchElasticEnvironment()],
        strategy=strategy,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    module, error = Trained(store, asks), ""
    data = TensorDataset(torch.randn(240, 4, generator=torch.Generator().manual_seed(0)))
    try:
        trainer.fit(module, DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=40))
    except Exception as cause:
        error = f"{type(cause).__name__}: {cause}"
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in module.parameters())
    return {
        "error": error,
        "at": time.time(),
        "digest": hashlib.sha256(weights).hexdigest(),
        "finite": all(bool(parameter.isfinite().all()) for parameter in module.parameters()),
        "epochs": trainer.current_epoch,
    }
