"""A Hydra application of one's own that uses this package's config groups, its sweeper and its launcher.

``python examples/own_app.py sync=byteps`` trains once; ``python examples/own_app.py -m sync=auto,byteps`` sweeps.
"""

from __future__ import annotations

import hydra
import lightning as L
from digits import Digits, loaders
from omegaconf import DictConfig, OmegaConf

from lightning_autosync import AutoSyncStrategy, ClusterSpec


@hydra.main(version_base="1.3", config_path="conf", config_name="own_app")
def main(config: DictConfig) -> float:
    L.seed_everything(0, verbose=False)
    cluster = ClusterSpec.from_dict(OmegaConf.to_container(config.cluster))
    trainer = L.Trainer(
        strategy=AutoSyncStrategy(plan=config.sync.plan, semantics=config.sync.semantics, cluster=cluster),
        accelerator="cpu",
        num_nodes=1,
        devices=cluster.world_size,
        max_epochs=config.max_epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Digits(), *loaders())
    accuracy = float(trainer.callback_metrics["val_accuracy"])
    if trainer.is_global_zero:
        print(f"validation accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
