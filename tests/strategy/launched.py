"""A training script as a user writes it: ``python launched.py STRATEGY RESULT``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import lightning_autosync  # noqa: F401  # before Lightning: registration must wait for it

torch.set_num_threads(1)


def main() -> None:
    from lightning.pytorch import Trainer, seed_everything
    from models import Plain

    strategy, result = sys.argv[1:]
    seed_everything(3)
    module = Plain()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    if trainer.is_global_zero:
        sums = [float(tensor.double().sum()) for tensor in module.state_dict().values()]
        Path(result).write_text(json.dumps(sums))


if __name__ == "__main__":
    main()
