"""Functions that Ray calls in its workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import ray.train
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer

from lightning_autosync.strategy.ray import RayAutoSyncStrategy
from lightning_autosync.training.digits import Digits, DigitsClassifier


class Facts(L.Callback):
    """Keeps what a strategy knows while it trains."""

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        strategy: Any = trainer.strategy
        self.sampler = strategy.distributed_sampler_kwargs
        report = strategy.report() if isinstance(strategy, RayAutoSyncStrategy) else None
        self.devices = None if report is None else [node.devices for node in report.resolution.cluster.nodes]
        self.topologies = None if report is None else sorted({group.topology for group in strategy.plan.groups})


def train(config: dict[str, Any]) -> None:
    """Train a few steps in two epochs; each rank leaves its weights and facts in ``config["folder"]``."""
    L.seed_everything(0, verbose=False)
    arguments = config["arguments"]
    facts, model = Facts(), DigitsClassifier()
    trainer = L.Trainer(
        strategy=RayDDPStrategy() if arguments is None else RayAutoSyncStrategy(**arguments),
        plugins=[RayLightningEnvironment()],
        callbacks=[facts, RayTrainReportCallback()],
        accelerator="cpu",
        devices="auto",
        max_epochs=2,
        limit_val_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        **config.get("trainer", {"limit_train_batches": 6}),
    )
    prepare_trainer(trainer).fit(model, datamodule=Digits())
    context = ray.train.get_context()
    found = {
        "weights": [value for parameter in model.parameters() for value in parameter.flatten().tolist()],
        "steps": trainer.global_step,
        "sampler": facts.sampler,
        "devices": facts.devices,
        "topologies": facts.topologies,
    }
    Path(config["folder"], f"{context.get_world_rank()}.json").write_text(json.dumps(found))
