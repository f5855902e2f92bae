"""Split the wide layer of a network over two ranks, the rest data parallel.

``python examples/split_operators.py``. With the file of a plan as argument, it trains `WideDigits` by that plan.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import lightning as L
from digits import Digits, WideDigits, loaders

from lightning_autosync import AutoDDLStrategy, HybridPlan

PLAN = """
format: autosync-hybrid/1
mesh: [2]
layers:
  - {module: features.0, signature: [dp]}             # each rank its own images
  - {module: features.2, signature: [dp]}
  - {module: fc, signature: [col]}                    # each rank makes 128 of 256 features, of all images
  - {module: head, signature: [row], output: [batch]} # and sums over them; then its own images again
"""


def main() -> None:
    L.seed_everything(0)
    if len(sys.argv) > 1:
        model, path = WideDigits(), Path(sys.argv[1])
    else:
        model, path = Digits(), Path(tempfile.gettempdir()) / "digits_hybrid_plan.yaml"
        path.write_text(PLAN)
    plan = HybridPlan.load(path)
    trainer = L.Trainer(
        strategy=AutoDDLStrategy(plan=path),
        accelerator="cpu",
        devices=plan.world_size,
        max_epochs=6,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    if trainer.is_global_zero:
        print(plan.describe())
    trainer.fit(model, *loaders())
    if trainer.is_global_zero:
        print(f"validation accuracy {float(trainer.callback_metrics['val_accuracy']):.3f}")


if __name__ == "__main__":
    main()
