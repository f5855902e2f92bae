"""The least there is to do: name the strategy. ``python examples/trainer.py``"""

from __future__ import annotations

import lightning as L
from digits import Digits, loaders

import lightning_autosync  # noqa: F401 - registers "autosync"


def main() -> None:
    L.seed_everything(0)
    training, validation = loaders()
    trainer = L.Trainer(
        strategy="autosync",
        accelerator="cpu",
        devices=2,
        max_epochs=6,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Digits(), training, validation)
    if trainer.is_global_zero:
        print(f"validation accuracy {float(trainer.callback_metrics['val_accuracy']):.3f}")


if __name__ == "__main__":
    main()
