"""How many steps schedules are told of, and that they make no more."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_autosync.strategy.schedules import ProgressSchedules, estimated_epochs, planned_progress


class Loop:
    """As much of a fit loop as an estimate asks for."""

    def __init__(self) -> None:
        self.max_batches = math.inf
        self.loaded = False

    def setup_data(self) -> None:
        self.loaded, self.max_batches = True, math.inf


@pytest.mark.parametrize("loaded", [True, False])
def test_the_length_of_an_epoch_is_known_while_optimizers_are_made(loaded: bool) -> None:
    loop = Loop()
    loop.loaded = loaded
    with estimated_epochs(loop, lambda: 6 if loop.loaded else None):
        if not loaded:
            loop.setup_data()
        assert loop.max_batches == 6
    assert loop.max_batches == math.inf
    assert loop.setup_data == Loop.setup_data.__get__(loop)


def trainer(**given: Any) -> Any:
    return SimpleNamespace(
        **{
            "callbacks": [],
            "max_epochs": 4,
            "max_steps": -1,
            "current_epoch": 0,
            "accumulate_grad_batches": 1,
            "num_training_batches": math.inf,
            **given,
        }
    )


class GradientAccumulationScheduler:
    """Named as Lightning's."""


@pytest.mark.parametrize(
    ("given", "share", "begun", "planned"),
    [
        ({}, 7, 0, 28),
        ({"accumulate_grad_batches": 2}, 7, 0, 16),
        ({}, None, 0, math.inf),
        # Shares are equal, and the Trainer knows them.
        ({"num_training_batches": 5}, None, 0, 20),
        ({"num_training_batches": 5, "max_steps": 12}, None, 0, 12),
        ({"max_epochs": -1, "max_steps": 12}, None, 0, 12),
        ({"max_epochs": -1}, 7, 0, math.inf),
        ({"callbacks": [GradientAccumulationScheduler()]}, 7, 0, math.inf),
        # Ranks drifted in the epochs before.
        ({"current_epoch": 2}, 7, 17, 28),
        # Another plan counted the steps of the epochs before.
        ({"current_epoch": 2}, 7, 0, 14),
    ],
)
def test_the_steps_that_a_job_will_have(given: dict[str, Any], share: int | None, begun: int, planned: float) -> None:
    assert planned_progress(trainer(**given), share, begun) == planned


@pytest.mark.parametrize(("frequency", "made"), [(1, 5), (2, 2)])
def test_a_schedule_does_not_go_beyond_its_end(frequency: int, made: int) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], 1.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    optimizer.step()
    module = SimpleNamespace(automatic_optimization=True, lr_scheduler_step=lambda scheduler, _: scheduler.step())
    progress = [0]
    fake = trainer(
        lightning_module=module,
        lr_scheduler_configs=[SimpleNamespace(interval="step", frequency=frequency, scheduler=scheduler)],
        fit_loop=SimpleNamespace(epoch_loop=_EpochLoop()),
    )
    schedules = ProgressSchedules(fake, lambda: progress[0], 5)
    progress[0] = 9
    schedules.follow()
    assert scheduler.last_epoch == made


class _EpochLoop:
    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        raise AssertionError
