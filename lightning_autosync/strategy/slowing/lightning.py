"""`SlowRanks` for the Trainer of ``lightning.pytorch``."""

from __future__ import annotations

from lightning.pytorch import Callback

from lightning_autosync.strategy.slowing.callback import SlowingMixin


class SlowRanks(SlowingMixin, Callback):
    __doc__ = SlowingMixin.__doc__
