"""Gradients of tables, of which only touched rows are sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lightning_autosync.engine.gradients import RowGradients


class Alone:
    """An exchange with no other rank."""

    def start(self, rows: Any) -> None:
        self._rows = rows

    def wait(self) -> Any:
        return self._rows


def test_a_gradient_of_none_counts_as_zeros() -> None:
    """An autograd function returned None for the table: its hook runs, and there is no gradient."""
    table = nn.Parameter(torch.ones(6, 2))
    message: Any = SimpleNamespace(numel=12, rows=6, sparse=False, variables=("table",))
    exchange: Any = Alone()
    gradients = RowGradients(message, table, exchange, world_size=1)
    gradients.arm()
    gradients.packer(0)()
    gradients.start()
    gradients.finish()
    assert table.grad is not None
    assert torch.equal(table.grad, torch.zeros(6, 2))
