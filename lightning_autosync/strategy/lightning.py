"""`AutoSyncStrategy` for the Trainer of ``lightning.pytorch``."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy

from lightning_autosync.strategy.mixin import AutoSyncMixin


class AutoSyncStrategy(AutoSyncMixin, DDPStrategy):
    __doc__ = AutoSyncMixin.__doc__
