"""What the processes of a `crew.Crew` do in fault tests of averages under a Trainer."""

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
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from strangers import SECRET
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_autosync import AutoSyncStrategy

VICTIM = 2
STRUCK = 8
"""Steps after which the victim waits for what the test does to it."""
EPOCHS = 3


class Trained(LightningModule):
    """A linear model of which one rank stands still before training, in the middle of a step, or of validation.

    Validation asks all ranks, by Lightning's own reduction and by a metric that calls ``torch.distributed`` itself.
    """

    def __init__(self, store: dist.Store, returns: bool, where: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.mean = MeanMetric()
        self.store, self.returns, self.where, self.steps = store, returns, where, 0
        self.rates: list[float] = []

    def setup(self, stage: str) -> None:
        if self.global_rank == VICTIM and self.where == "setup":
            self.stand_still()

    def training_step(self, batch: Any, _: int) -> Tensor:
        self.steps += 1
        if self.global_rank == VICTIM and self.steps == STRUCK and self.where == "training":
            self.stand_still()
        if self.returns and self.global_rank == 0 and self.current_epoch == 1:
            while self.store.add("returned", 0) == 0:
                time.sleep(0.05)
        time.sleep(0.01)
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any, _: int) -> None:
        if self.global_rank == VICTIM and not self.trainer.sanity_checking:
            if self.where == "validation":
                self.stand_still()
            elif self.where == "error in validation":
                raise ValueError("no luck")
        score = self.layer(batch[0]).square().mean()
        self.mean(score)
        self.log("reduced", score, sync_dist=True)
        self.log("metric", self.mean, batch_size=len(batch[0]))

    def on_train_epoch_start(self) -> None:
        if self.returns and self.global_rank == VICTIM and self.current_epoch > 0:
            self.store.add("returned", 1)
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def stand_still(self) -> None:
        if self.store.add("struck", 1) == 1:
            time.sleep(600.0)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.01, momentum=0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


def train(
    store: dist.Store,
    rank: int,
    size: int,
    rejoin: bool,
    port: int,
    meeting_port: int,
    folder: str,
    plan: str = "partial_reduce",
    where: str = "training",
    returns: bool = False,
    again: bool = False,
    interval: float = 1.0,
) -> dict[str, Any]:
    """Train `EPOCHS` epochs; where a rank comes back, it is started with what it was started with before.

    Args:
        where: the victim stands still.
        returns: whether the second epoch waits for the victim.
        again: whether all train for one more epoch, with a Trainer of its own.
        interval: share of an epoch after which to validate.
    """
    place: dict[str, Any] = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    place |= {"AUTOSYNC_PORT": meeting_port}
    place["AUTOSYNC_SECRET"] = SECRET.decode()
    os.environ.update({name: str(value) for name, value in place.items()})
    best = ModelCheckpoint(folder, monitor="metric", save_top_k=1, save_last=True)
    stopping = EarlyStopping("reduced", patience=EPOCHS)
    trainer = make_trainer(plan, size, [best, stopping], EPOCHS, interval)
    module, error, rates = Trained(store, returns, where), "", []
    data = TensorDataset(torch.randn(240, 4, generator=torch.Generator().manual_seed(0)))
    loaders = DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=40)
    try:
        trainer.fit(module, *loaders, ckpt_path="last")
        rates = [*module.rates]
        if again:
            make_trainer(plan, size, [], 1, interval).fit(module, *loaders)
    except Exception as cause:
        error = f"{type(cause).__name__}: {cause}"
        store.add("failed", 1)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in module.parameters())
    replica: Any = trainer.strategy._replica
    return {
        "error": error,
        "at": time.time(),
        "digest": hashlib.sha256(weights).hexdigest(),
        "finite": all(bool(parameter.isfinite().all()) for parameter in module.parameters()),
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "scores": [float(trainer.callback_metrics.get(name, -1.0)) for name in ("reduced", "metric")],
        "answering": dist.get_world_size() if dist.is_initialized() else 0,
        "best": best.best_model_path,
        "waited": float(stopping.best_score),
        "rates": rates,
        "came back": replica is not None and replica.rejoined,
    }


def make_trainer(plan: str, size: int, callbacks: list[Any], epochs: int, interval: float) -> Trainer:
    """A Trainer of one of ``size`` ranks."""
    strategy = AutoSyncStrategy(
        plan=plan, semantics="relaxed", heartbeat=HEARTBEAT, stall=20, timeout=timedelta(seconds=90)
    )
    return Trainer(
        accelerator="cpu",
        devices=size,
        plugins=[TorchElasticEnvironment()],
        strategy=strategy,
        callbacks=callbacks,
        max_epochs=epochs,
        val_check_interval=interval,
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
