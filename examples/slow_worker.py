"""Partial reduce beside all-reduce where one worker is slow.

``python examples/slow_worker.py`` runs all cells. VS Code, Spyder and Jupyter (with jupytext) open this file as a
notebook.
"""

# %% [markdown]
# # One of four workers is slow
#
# `SlowRanks` slows a worker down on purpose. Under all-reduce all workers wait for it in each step. Under partial
# reduce (SIGMOD 2021) those that are ready average their models in groups, and faster workers take more batches. The
# result is no longer DDP's, so the accuracy belongs beside the speed.

# %%
from __future__ import annotations

import logging
import time
import warnings
from typing import Any

import lightning as L
import torch
from digits import Digits, loaders

from lightning_autosync import AutoSyncStrategy
from lightning_autosync.strategy.slowing.lightning import SlowRanks

WORKERS, SLOW, EPOCHS = 4, 3, 4
COMPUTE, FACTOR = 0.02, 4.0  # seconds of a step's computation, and how many times as long the slow worker takes
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.set_num_threads(1)


class Speed(L.Callback):
    """Logs the seconds of the training, and the steps of all workers together; all workers validate at one time."""

    def on_train_start(self, *_: Any) -> None:
        self._begun, self._steps = time.perf_counter(), 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        self._steps += 1

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        module.log("seconds", time.perf_counter() - self._begun)
        module.log("steps", self._steps, sync_dist=True, reduce_fx="sum")
        of_slow = self._steps if trainer.global_rank == SLOW else 0.0
        module.log("slow_steps", of_slow, sync_dist=True, reduce_fx="sum")


def train(plan: str) -> dict[str, float]:
    """Train by a builder's plan; what the training logged last."""
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        strategy=AutoSyncStrategy(plan, semantics="relaxed", start_method="fork"),
        accelerator="cpu",
        devices=WORKERS,
        max_epochs=EPOCHS,
        num_sanity_val_steps=0,
        callbacks=[Speed(), SlowRanks([{"ranks": [SLOW], "factor": FACTOR}], compute=COMPUTE)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), *loaders())
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


# %% [markdown]
# ## Both, one after the other
#
# The slow worker sleeps 60 ms in each step. Both trainings compute the same number of batches in all.

# %%
for plan in ("all_reduce", "partial_reduce"):
    found = train(plan)
    rate = found["steps"] / found["seconds"]
    print(
        f"{plan}: {found['steps']:.0f} steps of all workers in {found['seconds']:.1f} s, {rate:.1f} steps per second; "
        f"{found['slow_steps'] / found['steps']:.1%} of them by the slow worker; "
        f"validation accuracy {found['val_accuracy']:.3f}"
    )

# %% [markdown]
# `autosync converge experiment=stragglers` compares ten methods on the time to an accuracy, over several seeds, with
# a learning rate chosen for each ([results](../docs/measured-relaxed.md#relaxed-synchronization-time-to-a-metric)).
