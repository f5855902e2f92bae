"""`SyncMonitor` for the Trainer of ``lightning.pytorch``."""

from __future__ import annotations

from lightning.pytorch import Callback

from lightning_autosync.strategy.monitor.callback import MonitorMixin


class SyncMonitor(MonitorMixin, Callback):
    __doc__ = MonitorMixin.__doc__
