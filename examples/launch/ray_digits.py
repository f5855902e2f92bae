"""AutoSync in two workers of Ray Train: ``python examples/launch/ray_digits.py``.

Needs ``pip install '.[ray]'`` in a checkout. It trains on the Ray cluster that this node belongs to, or else on this
machine.
"""

from __future__ import annotations

import lightning as L
from ray.train import RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer

from lightning_autosync.strategy.ray import RayAutoSyncStrategy
from lightning_autosync.training.digits import Digits, DigitsClassifier


def train() -> None:
    """The function that Ray calls in each worker."""
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        strategy=RayAutoSyncStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        accelerator="cpu",
        devices="auto",
        max_epochs=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    prepare_trainer(trainer).fit(DigitsClassifier(), datamodule=Digits())


def main(storage: str | None = None) -> None:
    """Train; checkpoints go to ``storage``, a folder that all nodes share, or to Ray's default folder."""
    workers = ScalingConfig(num_workers=2)
    result = TorchTrainer(train, scaling_config=workers, run_config=RunConfig(storage_path=storage)).fit()
    print(f"validation accuracy {result.metrics['val_accuracy']:.3f}")


if __name__ == "__main__":
    main()
