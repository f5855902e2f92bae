"""During training, calls of an optimizer's step go to the replica. Afterwards they make the optimizer's own step."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from lightning_autosync.strategy.intercepted_steps import intercepted_steps


@pytest.mark.parametrize("scheduled", ["never", "before", "during"])
def test_the_replica_makes_each_step_and_the_optimizer_steps_within_it(scheduled: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    made: list[float] = []

    def schedule(when: str) -> None:
        if scheduled == when:
            LambdaLR(optimizer, lambda _: 1.0)

    def closure() -> float:
        weight.grad = torch.ones(1)
        return 5.0

    def make() -> None:
        made.append(float(weight))
        optimizer.step()

    schedule("before")
    with intercepted_steps(optimizer, nullcontext, make):
        schedule("during")
        kept = optimizer.step
        assert optimizer.step(closure) == 5.0
        optimizer.step()
    assert made == [0.0, -1.0]
    assert float(weight) == -2.0
    for step in (optimizer.step, kept):
        step()
    assert made == [0.0, -1.0]
    assert float(weight) == -4.0
