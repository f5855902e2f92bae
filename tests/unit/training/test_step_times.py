"""Times of steps are those of the work, on accelerators too, where the host only starts it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_autosync.training.rank import StepTimes


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_steps_end_when_the_device_is_done(device: str) -> None:
    clock = iter(range(100))
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device)))
    times = StepTimes()

    def finish(_: torch.device) -> None:  # the work still takes ten seconds
        for _ in range(10):
            next(clock)

    with (
        mock.patch("torch.accelerator.synchronize", side_effect=finish) as done,
        mock.patch("time.perf_counter", side_effect=lambda: float(next(clock))),
    ):
        times.on_train_epoch_start(trainer)
        times.on_train_batch_end(trainer)
        times.on_validation_end(trainer)
        times.on_train_batch_end(trainer)
    if device == "cpu":
        assert not done.called
        assert times.seconds == [1.0, 1.0]
    else:
        assert {call.args for call in done.call_args_list} == {(torch.device(device),)}
        assert times.seconds == [11.0, 11.0]
