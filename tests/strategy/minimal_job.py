"""Jobs of a user who has installed the package without extras: ``python minimal_job.py RESULT``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import missing

missing.hide()

import torch  # noqa: E402

import lightning_autosync  # noqa: E402
from lightning_autosync.strategy.tuning import predictor  # noqa: E402

torch.set_num_threads(1)
# Rank 0 starts a new process for the search.
predictor._PROGRAM = predictor._PROGRAM.replace("from ", "import missing; missing.hide(); from ", 1)


def main() -> None:
    from lightning.pytorch import Trainer
    from models import Plain

    star = lightning_autosync.ClusterSpec.star(["400 Mbit/s", "100 Mbit/s"])
    tuning = lightning_autosync.TuningSettings(probe=0, cache=None)
    by_search = lightning_autosync.AutoSyncStrategy(cluster=star, tuning=tuning)
    told = {}
    for name, strategy in (("on one host", "autosync"), ("on two hosts", by_search)):
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_steps=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Plain())
        assert trainer.global_step == 2
        told[name] = trainer.strategy.report().to_dict()
    if trainer.is_global_zero:
        Path(sys.argv[1]).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
