"""The common base of the callbacks that slow ranks down."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from pydantic import ValidationError

from lightning_autosync.documents import describe_validation_error
from lightning_autosync.errors import DocumentError
from lightning_autosync.measure.models.straggler import Slowdown, Straggler, StragglerSettings

BACKWARD = 2.0
"""Computation of a backward pass relative to that of its forward pass."""


class SlowingMixin:
    """A callback that makes some ranks slower, to test training on unequal workers.

    A slow rank sleeps between the forward and the backward pass of each batch. The computation of a batch is taken to
    be three times its forward pass, because the backward pass may include waiting for other ranks. Here, ranks 0 and 1
    run at half speed, and rank 2 pauses for about 0.1 s in about every tenth batch::

        slowdowns = [{"ranks": [0, 1], "factor": 2}, {"ranks": [2], "pause_probability": 0.1, "pause": 0.1}]
        trainer = Trainer(strategy="autosync", callbacks=[SlowRanks(slowdowns)])

    Args:
        slowdowns: mappings with fields of `lightning_autosync.measure.models.straggler.Slowdown`: ``ranks`` (default:
            all), ``factor`` on the seconds of computation (default: 1), ``pause_probability`` per batch (default: 0),
            ``pause`` (mean seconds; needed with ``pause_probability``), ``begin`` (first slow batch, default: 0) and
            ``end`` (first batch that is not slow any more; default: none). Each rank counts its batches from the start
            of training. If several slowdowns hold, their factors multiply and their pauses add up.
        seed: seed of the random pauses, which differ between ranks. Default: 0.
        compute: seconds of computation of a batch. None (default): measured, which ``micro_batch`` and
            ``overlap`` do not allow.
        sleep: function that waits for a number of seconds. Default: ``time.sleep``.

    Raises:
        DocumentError: a slowdown is wrong.
    """

    def __init__(
        self,
        slowdowns: Sequence[Slowdown | Mapping[str, Any]],
        seed: int = 0,
        compute: float | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        given = {"slowdowns": [dict(slowdown) for slowdown in slowdowns], "seed": seed}
        try:
            self._settings = StragglerSettings.model_validate(given)
        except ValidationError as error:
            raise DocumentError(f"SlowRanks: {describe_validation_error(error, given)}") from None
        if compute is not None and compute <= 0:
            raise DocumentError(
                f"SlowRanks: compute: expected seconds above 0, or None to measure them; got {compute:g}"
            )
        self._compute, self._sleep = compute, sleep
        self._straggler: Straggler | None = None
        self._begun = 0.0
        self._due = False

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        last = trainer.world_size - 1
        for index, slowdown in enumerate(self._settings.slowdowns):
            if slowdown.ranks is not None and max(slowdown.ranks) > last:
                raise DocumentError(
                    f"SlowRanks: slowdowns[{index}].ranks: there is no rank {max(slowdown.ranks)}; allowed: 0 to {last}"
                )
        measures = self._compute is None and any(each.factor > 1 for each in self._settings.slowdowns)
        if measures and not getattr(trainer.strategy, "forward_can_be_timed", True):
            raise DocumentError(
                "SlowRanks: compute: missing; with micro_batch or overlap, the seconds of computation of a batch "
                "must be given, because they cannot be measured"
            )
        self._straggler = Straggler(self._settings, trainer.global_rank, self._sleep)

    def on_train_batch_start(self, *_: Any) -> None:
        self._begun, self._due = time.perf_counter(), True

    def on_before_backward(self, trainer: Any, *_: Any) -> None:
        self._slow_down(trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._slow_down(trainer)  # for a batch without a backward pass

    def _slow_down(self, trainer: Any) -> None:
        """Sleep, once per batch."""
        if not self._due or self._straggler is None:
            return
        self._due = False
        compute = self._compute
        if compute is None:
            device = trainer.strategy.root_device
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            compute = (1.0 + BACKWARD) * (time.perf_counter() - self._begun)
        self._straggler(compute)
