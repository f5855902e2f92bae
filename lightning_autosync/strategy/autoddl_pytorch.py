"""`AutoDDLStrategy` for the Trainer of ``pytorch_lightning``."""

from __future__ import annotations

from pytorch_lightning.strategies import ModelParallelStrategy
from pytorch_lightning.utilities import CombinedLoader

from lightning_autosync.strategy.autoddl import AutoDDLMixin


class AutoDDLStrategy(AutoDDLMixin, ModelParallelStrategy):
    __doc__ = AutoDDLMixin.__doc__

    combined_loader = CombinedLoader
