"""Periods that are not over when replicas meet: an outer update that is never made is told of."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from test_group_average import together
from torch import nn

from lightning_autosync.plan import Consistency
from lightning_autosync.relaxed.model_state import ModelTensors
from lightning_autosync.relaxed.periodic import Periodic
from lightning_autosync.relaxed.transport.mesh import Mesh


def train(settings: dict[str, Any], epochs: list[int]) -> None:
    """Two replicas that meet after so many steps each time."""

    def play(mesh: Mesh) -> None:
        module = nn.Linear(3, 2)
        worker = Periodic(mesh, ModelTensors.of(module), Consistency(mode="periodic", **settings), timeout=20.0)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        worker.start()
        for steps in epochs:
            for _ in range(steps):
                for parameter in module.parameters():
                    parameter.grad = torch.ones_like(parameter)
                worker.step(optimizer, 4)
            worker.finish()
            worker.drain()
            worker.resume()
        worker.close()

    together(2, play)


LONG = [
    {"period": 5, "outer": "diloco"},
    {"period": 5, "outer": "slowmo", "fragments": 2},
    {"period": 5, "outer": "diloco", "warmup": 1},
]


@pytest.mark.parametrize("settings", LONG, ids=["all at once", "by fragments", "after a warmup"])
def test_a_period_that_no_epoch_reaches_is_named_once(settings: dict[str, Any]) -> None:
    with pytest.warns(
        UserWarning,
        match=r"consistency.period: all replicas met before a period of 5 steps was over.* without the outer",
    ) as caught:
        train(settings, [4, 4])
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("settings", "epochs"),
    [
        ({"period": 2, "outer": "diloco"}, [5, 3]),
        ({"period": 4, "outer": "slowmo", "fragments": 2}, [4, 0, 6]),
        ({"period": 5, "outer": "diloco", "warmup": 9}, [4, 4]),
        ({"period": 9, "outer": "averaging"}, [4]),
    ],
    ids=["some over", "a fragment a turn", "still warming", "drains do the same"],
)
def test_otherwise_nothing_is_said(settings: dict[str, Any], epochs: list[int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(settings, epochs)
