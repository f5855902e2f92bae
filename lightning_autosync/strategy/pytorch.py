"""`AutoSyncStrategy` for the Trainer of ``pytorch_lightning``."""

from __future__ import annotations

from typing import Any

from pytorch_lightning.strategies import DDPStrategy

from lightning_autosync.strategy.mixin import AutoSyncMixin


class AutoSyncStrategy(AutoSyncMixin, DDPStrategy):
    __doc__ = AutoSyncMixin.__doc__

    strategy_name = "autosync"

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Do nothing: importing `lightning_autosync` registers the names."""
