"""What the processes of a `crew.Crew` do in tests of hooks that run after an error, such as a last checkpoint."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from named_ranks import cluster_of, join, plan_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autosync import AutoSyncStrategy

STRUCK = 3
"""Steps after which ranks meet their fault."""
WRITING = 4.0
"""Seconds that a checkpoint takes: more than a live rank may take to answer, and than one waits after a SIGTERM."""
LASTING = 30.0
"""Seconds for which a process that outlives its error waits for the others' ends."""


class Faulty(LightningModule):
    """A small model some ranks of which end with an error, or get a signal."""

    def __init__(self, how: str, ranks: list[int]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.how, self.ranks = how, ranks

    def training_step(self, batch: Any, index: int) -> Tensor:
        if index == STRUCK and dist.get_rank() in self.ranks:
            if self.how == "error":
                raise ValueError("no luck")
            os.kill(os.getpid(), signal.SIGTERM)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


class SlowWriter(TorchCheckpointIO):
    """Writes slowly, and notes when a checkpoint is whole."""

    written = 0.0

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(WRITING)
        super().save_checkpoint(*args, **kwargs)
        self.written = time.time()


class Notes(Callback):
    """Notes the errors of which hooks are told after a checkpoint."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.told.append(type(exception).__name__)


def train(
    store: dist.Store,
    rank: int,
    size: int,
    rejoin: bool,
    port: int,
    folder: str,
    kind: str,
    how: str,
    ranks: list[int],
    lasting: bool,
) -> dict[str, Any]:
    """What ``fit`` raises on this rank, when, and what became of the checkpoint in its hooks."""
    join(rank, size, port)
    module, writer, notes, error = Faulty(how, ranks), SlowWriter(), Notes(), ""
    plan, cluster = plan_of(kind, module, size), cluster_of(kind, size)
    trainer = Trainer(
        accelerator="cpu",
        devices=size,
        plugins=[TorchElasticEnvironment(), writer],
        strategy=AutoSyncStrategy(plan, cluster=cluster, timeout=timedelta(seconds=600)),
        callbacks=[OnExceptionCheckpoint(folder)],
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # Lightning itself would put checkpoints last.
    trainer.callbacks.append(notes)
    data = TensorDataset(torch.randn(800, 8, generator=torch.Generator().manual_seed(0)))
    began = time.time()
    try:
        trainer.fit(module, DataLoader(data, batch_size=4))
    except BaseException as cause:
        error = f"{type(cause).__name__}: {cause}"
    found = {
        "error": error,
        "seconds": time.time() - began,
        "at": time.time(),
        "written": writer.written,
        "told": notes.told,
    }
    if lasting:
        # As in a notebook: this process's connections stay open.
        store.add("ended", 1)
        limit = time.monotonic() + LASTING
        while store.add("ended", 0) < size and time.monotonic() < limit:
            time.sleep(0.1)
    return found
