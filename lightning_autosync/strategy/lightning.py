"""`AutoSyncStrategy` for the Trainer of ``lightning.pytorch``."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from lightning_autosync.strategy.mixin import AutoSyncMixin


class AutoSyncStrategy(AutoSyncMixin, DDPStrategy):
    __doc__ = AutoSyncMixin.__doc__

    strategy_name = "autosync"

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Do nothing: importing `lightning_autosync` registers the names."""
