"""How long training steps take."""

from __future__ import annotations

import time
from typing import Any

import lightning as L


class StepTimes(L.Callback):
    """Records when each batch of training ended, and so what each step took, loading of its batch included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_epoch_start(self, *_: Any) -> None:
        self._last = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now

    def on_validation_end(self, *_: Any) -> None:
        self._last = time.perf_counter()  # validation within an epoch is no part of a step
