"""A job in the layout of lightning-hydra-template: every part is made from a group of configs by its ``_target_``.

``python examples/hydra_template/train.py trainer=autosync`` trains with AutoSync, ``trainer=ddp`` with DDP. Take
``configs/trainer/autosync.yaml`` over into your own project; its code stays as it is.
"""

from __future__ import annotations

import sys
from pathlib import Path

import hydra
import lightning as L
from hydra.utils import instantiate
from omegaconf import DictConfig

sys.path.insert(0, str(Path(__file__).parents[1]))  # the template does this by rootutils


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(config: DictConfig) -> float:
    L.seed_everything(config.seed, workers=True)
    datamodule: L.LightningDataModule = instantiate(config.data)
    model: L.LightningModule = instantiate(config.model)
    trainer: L.Trainer = instantiate(config.trainer)
    trainer.fit(model=model, datamodule=datamodule)
    metric = float(trainer.callback_metrics[config.optimized_metric])
    if trainer.is_global_zero:
        print(f"{type(trainer.strategy).__name__}: validation accuracy {metric:.3f}")
    return metric


if __name__ == "__main__":
    main()
