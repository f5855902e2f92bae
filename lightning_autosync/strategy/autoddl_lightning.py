"""`AutoDDLStrategy` for the Trainer of ``lightning.pytorch``."""

from __future__ import annotations

from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import CombinedLoader

from lightning_autosync.strategy.autoddl import AutoDDLMixin


class AutoDDLStrategy(AutoDDLMixin, ModelParallelStrategy):
    __doc__ = AutoDDLMixin.__doc__

    combined_loader = CombinedLoader
