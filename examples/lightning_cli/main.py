"""LightningCLI: the configuration names the strategy, and this code does not import lightning_autosync.

``python examples/lightning_cli/main.py fit --config examples/lightning_cli/config.yaml`` trains.
``--trainer.strategy.help lightning_autosync.AutoSyncStrategy`` in place of ``--config ...`` lists all arguments.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lightning.pytorch.cli import LightningCLI

sys.path.insert(0, str(Path(__file__).parents[1]))

from digits import Digits, DigitsData


def main() -> None:
    cli = LightningCLI(Digits, DigitsData, save_config_kwargs={"overwrite": True})
    if cli.subcommand == "fit" and cli.trainer.is_global_zero:
        print(f"validation accuracy {float(cli.trainer.callback_metrics['val_accuracy']):.3f}")


if __name__ == "__main__":
    main()
