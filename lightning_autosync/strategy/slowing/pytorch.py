"""`SlowRanks` for the Trainer of ``pytorch_lightning``."""

from __future__ import annotations

from pytorch_lightning import Callback

from lightning_autosync.strategy.slowing.callback import SlowingMixin


class SlowRanks(SlowingMixin, Callback):
    __doc__ = SlowingMixin.__doc__
