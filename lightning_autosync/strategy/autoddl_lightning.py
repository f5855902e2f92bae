"""`AutoDDLStrategy` for the Trainer of ``lightning.pytorch``."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import CombinedLoader

from lightning_autosync.strategy.autoddl import AutoDDLMixin


class AutoDDLStrategy(AutoDDLMixin, ModelParallelStrategy):
    __doc__ = AutoDDLMixin.__doc__

    strategy_name = "autoddl"
    combined_loader = CombinedLoader

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Do nothing: importing `lightning_autosync` registers the names."""
