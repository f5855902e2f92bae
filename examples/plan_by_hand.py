"""A plan is data: write one, look at it, save it, train by it. ``python examples/plan_by_hand.py``"""

from __future__ import annotations

import tempfile
from pathlib import Path

import lightning as L
from digits import Digits, loaders

from lightning_autosync import AutoSyncStrategy, ClusterSpec, SyncPlan
from lightning_autosync.workload import describe

PLAN = """
format: autosync-plan/1
world_size: 4
groups:
  - name: head                 # small and ready first: one message, halved and doubled along a tree
    variables: [head.bias, head.weight]
    topology: tree
  - name: fc                   # large: rank 0 has the fattest link, so it reduces half of the rows
    variables: [fc.weight]
    architecture: parameter_server
    topology: star
    partition: {axis: 0, shards: 4}
    placement: [0, 0, 1, 2]
    priority: 1
  - name: convolutions         # the backend's own all-reduce
    variables: [features.2.bias, features.2.weight, features.0.bias, features.0.weight, fc.bias]
    topology: native
"""


def main() -> None:
    L.seed_everything(0)
    path = Path(tempfile.gettempdir()) / "digits_plan.yaml"
    path.write_text(PLAN)
    plan = SyncPlan.load(path)
    trainer = L.Trainer(
        strategy=AutoSyncStrategy(plan=path, cluster=ClusterSpec.uniform(nodes=1, devices=4)),
        accelerator="cpu",
        devices=4,
        max_epochs=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    if trainer.is_global_zero:
        print(plan.describe(describe(Digits())))
    trainer.fit(Digits(), *loaders())
    if trainer.is_global_zero:
        print(f"validation accuracy {float(trainer.callback_metrics['val_accuracy']):.3f}")


if __name__ == "__main__":
    main()
