"""`SyncMonitor` for the Trainer of ``pytorch_lightning``."""

from __future__ import annotations

from pytorch_lightning import Callback

from lightning_autosync.strategy.monitor.callback import MonitorMixin


class SyncMonitor(MonitorMixin, Callback):
    __doc__ = MonitorMixin.__doc__
