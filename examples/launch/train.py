"""A training that takes its shape from torchrun, which the platforms beside this file start on every node.

``torchrun --standalone --nproc-per-node=2 examples/launch/train.py`` runs it on this machine.
"""

from __future__ import annotations

import os

import lightning as L

import lightning_autosync  # noqa: F401 - registers "autosync"
from lightning_autosync.training.digits import Digits, DigitsClassifier


def main() -> None:
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        strategy="autosync",
        accelerator="cpu",
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(DigitsClassifier(), datamodule=Digits())
    if trainer.is_global_zero:
        accuracy = float(trainer.callback_metrics["val_accuracy"])
        print(f"{trainer.world_size} ranks, validation accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
