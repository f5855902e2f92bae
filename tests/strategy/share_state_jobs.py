"""Batch shares with what else changes or keeps gradients: loss scalers, sparse rows, compressors, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from share_jobs import BATCH, FEATURES, SAMPLES, Clock, Numbered, distance, fit, make_module, network
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_autosync import ClusterSpec, builders
from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.strategy.shares import auto
from lightning_autosync.workload import describe

RANKS = 4
GLOBAL = RANKS * BATCH


def global_batches(epoch: int, samples: int = SAMPLES) -> list[Tensor]:
    """The numbers of the samples in the global batches of an epoch."""
    return list(torch.randperm(samples, generator=torch.Generator().manual_seed(epoch)).split(GLOBAL))


def overflows() -> dict[str, Any]:
    """Training with a loss scaler, where the gradient of one rank is infinite in two batches of each epoch.

    In the second one, which is short, that rank has no samples, and repeats one of another rank.
    """
    module, epochs = make_module(), 2
    usual = type(module).training_step

    def training_step(self: Any, batch: Any, index: int) -> Tensor:
        with torch.autocast("cpu", enabled=False):  # rounding would differ from that of one process
            loss: Tensor = usual(self, batch, index)
        return loss * torch.inf if (index, dist.get_rank()) in ((2, 3), (5, 0)) else loss

    type(module).training_step = training_step
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    plugins = [TorchElasticEnvironment(), MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    fit(module, max_epochs=epochs, plugins=plugins)
    data, model = Numbered(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        for index, batch in enumerate(global_batches(epoch)):
            if index != 2:  # the scaler skips the step on all ranks
                optimizer.zero_grad()
                F.cross_entropy(model(data.inputs[batch]), data.labels[batch]).backward()
                optimizer.step()
    return {"distance": distance(module.network, model), "scale": scaler.get_scale()}


class Rows(LightningModule):
    """A table whose gradient is sparse. A sample reads the row of its label, and row 3 if its first input is large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(5, FEATURES, sparse=True)

    def training_step(self, batch: Any, index: int) -> Tensor:
        _, inputs, labels = batch
        rows = torch.where(inputs[:, 0] > 1.0, 3, labels)
        return ((self.table(rows) * inputs).sum(1) - 1.0).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Numbered(), BATCH, shuffle=True)


def sparse_rows() -> dict[str, float]:
    """The distance from one process of a table whose rows not all ranks read in a batch."""
    module, model, epochs = Rows(), Rows(), 3
    fit(module, max_epochs=epochs)
    data, optimizer = Numbered(), model.configure_optimizers()
    for epoch in range(epochs):
        for index, batch in enumerate(global_batches(epoch)):
            optimizer.zero_grad()
            model.training_step((batch, data.inputs[batch], data.labels[batch]), index).backward()
            optimizer.step()
    return {"distance": distance(module, model), "moved": distance(module, Rows())}


class Linear(LightningModule):
    """A loss whose gradient does not depend on the parameters, so that errors of compression only add up."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(FEATURES))
        self.residual = torch.zeros(FEATURES)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return (batch[1] @ self.weight).mean()

    def on_train_end(self) -> None:
        memory = self.trainer.strategy.engine.state_dict()["weight"]  # type: ignore[attr-defined]
        self.residual = memory.tensors["residual"].flatten().clone()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Numbered(), BATCH, shuffle=True)


def error_feedback(compressor: str) -> dict[str, float]:
    """The error of the sum of all gradients under compression, and what ranks have not sent yet of these means."""
    plan = builders.all_reduce(
        describe(Linear()), ClusterSpec.uniform(RANKS, 1), topology="ring", compressor=compressor
    )
    module, data, epochs = Linear(), Numbered(), 5
    fit(module, max_epochs=epochs, strategy={"plan": plan, "semantics": "compressed"})
    exact = -sum(data.inputs[batch].mean(0) for epoch in range(epochs) for batch in global_batches(epoch))
    left = module.residual.clone()
    dist.all_reduce(left)
    error = module.weight.detach() - exact
    return {
        "error": float(error.abs().max()),
        "unexplained": float((error - left).abs().max()),
        "residual": float(left.abs().max()),
    }


def resumes_in_mid_epoch(folder: str, shares: Any) -> dict[str, Any]:
    """Training that changes its shares and saves in mid-epoch, and goes on from there with other shares."""
    clock, samples, saved_at = Clock(), GLOBAL * 24, 16

    def make() -> Any:
        module = make_module(samples=samples)

        def compute(batch: int, count: int) -> None:
            clock.seconds += 0.05 * count * (4.0 if dist.get_rank() == RANKS - 1 else 1.0)

        module.compute = compute
        return module

    saving = ModelCheckpoint(folder, every_n_train_steps=saved_at, save_top_k=-1, filename="middle")
    options = {"enable_checkpointing": True, "callbacks": [saving]}
    first, second = make(), make()
    with mock.patch.object(auto, "now", clock):
        fit(first, max_steps=saved_at, max_epochs=1, strategy={"batch_shares": "auto"}, **options)
        dist.barrier()
        resume_from = str(next(Path(folder).glob("middle*.ckpt")))
        fit(second, max_epochs=2, strategy={"batch_shares": shares}, ckpt_path=resume_from)
    data, model = Numbered(samples), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # Like under DDP, the rest of the epoch begins with its first batches: data loaders have no state.
    order = global_batches(0, samples)
    for batch in [*order[:saved_at], *order[: 24 - saved_at], *global_batches(1, samples)]:
        optimizer.zero_grad()
        F.cross_entropy(model(data.inputs[batch]), data.labels[batch]).backward()
        optimizer.step()
    counts = [[len(numbers) for _, numbers, _ in module.seen] for module in (first, second)]
    slowest = [gather_json(each)[-1] for each in counts]
    return {"distance": distance(second.network, model), "before": slowest[0], "after": slowest[1]}
