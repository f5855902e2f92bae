"""`AutoSyncStrategy` for the Trainer of ``pytorch_lightning``."""

from __future__ import annotations

from pytorch_lightning.strategies import DDPStrategy

from lightning_autosync.strategy.mixin import AutoSyncMixin


class AutoSyncStrategy(AutoSyncMixin, DDPStrategy):
    __doc__ = AutoSyncMixin.__doc__
