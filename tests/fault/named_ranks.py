"""What the processes of a `crew.Crew` do in tests that ask who is named when a rank fails."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autosync import AutoSyncStrategy, builders
from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.workload import describe

STRUCK = 3
"""Steps after which the victim meets its fault."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "native": ("all_reduce", {"topology": "native"}),
    "ring": ("all_reduce", {"topology": "ring"}),
    "tree": ("all_reduce", {"topology": "tree"}),
    "shared memory": ("all_reduce", {"topology": "shared_memory"}),
    "all-to-all": ("ps", {"topology": "native"}),
    "star": ("ps", {"topology": "star"}),
}


class Job(LightningModule):
    """A linear model of which one rank fails in the middle of a step."""

    def __init__(self, store: dist.Store, how: str, where: str, victim: int) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.store, self.how, self.where, self.victim = store, how, where, victim
        self.struck = 0.0

    def training_step(self, batch: Any, index: int) -> Tensor:
        if index == STRUCK and self.where == "training":
            self.meet_fate()
        time.sleep(0.005)
        return self.layer(batch[0]).square().mean()

    def meet_fate(self) -> None:
        self.store.add("reached", 1)
        if self.global_rank != self.victim:
            return
        self.store.set("struck", str(time.time()))
        if self.how == "exception":
            raise ValueError("a fault of this rank's own")
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}[self.how])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def plan_of(kind: str, module: nn.Module, size: int) -> Any:
    builder, options = KINDS[kind]
    nodes = 1 if kind == "shared memory" else size
    return builders.build(builder, describe(module), ClusterSpec.uniform(nodes, size // nodes), **options)


def join(rank: int, size: int, port: int) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})


def train(
    store: dist.Store,
    rank: int,
    size: int,
    rejoin: bool,
    port: int,
    kind: str,
    how: str,
    victim: int,
    timeout: float,
    where: str = "training",
) -> dict[str, Any]:
    """What ``fit`` raises on this rank, and when."""
    join(rank, size, port)
    module = Job(store, how, where, victim)
    strategy = AutoSyncStrategy(plan=plan_of(kind, module, size), timeout=timedelta(seconds=timeout))
    trainer = Trainer(
        accelerator="cpu",
        devices=size,
        plugins=[TorchElasticEnvironment()],
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(torch.randn(8000, 8, generator=torch.Generator().manual_seed(0)))
    kinds, error = [""], ""
    try:
        trainer.fit(module, DataLoader(data, batch_size=4))
    except BaseException as cause:
        kinds, error = [each.__name__ for each in type(cause).__mro__], str(cause)
    return {"kinds": kinds, "error": error, "at": time.time()}
