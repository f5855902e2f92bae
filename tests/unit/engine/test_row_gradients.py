"""Gradients of tables, of which only touched rows are sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_autosync.engine import row_gradients as module
from lightning_autosync.engine.row_gradients import RowGradients, touched_rows


class Alone:
    """An exchange with no other rank."""

    def start(self, rows: Any) -> None:
        self._rows = rows

    def wait(self) -> Any:
        return self._rows


def test_a_gradient_of_none_counts_as_zeros() -> None:
    """An autograd function returned None for the table: its hook runs, and there is no gradient."""
    table = nn.Parameter(torch.ones(6, 2))
    message: Any = SimpleNamespace(name="table", numel=12, rows=6, sparse=False, variables=("table",))
    exchange: Any = Alone()
    gradients = RowGradients(message, table, exchange, world_size=1)
    gradients.arm()
    gradients.on_arrival(0)()
    gradients.start()
    gradients.finish()
    assert table.grad is not None
    assert torch.equal(table.grad, torch.zeros(6, 2))


def test_a_gradient_with_a_graph_takes_the_mean() -> None:
    """Of a backward pass with create_graph=True."""
    table = nn.Parameter(torch.ones(6, 2))
    message: Any = SimpleNamespace(name="table", numel=12, rows=6, sparse=False, variables=("table",))
    exchange: Any = Alone()
    gradients = RowGradients(message, table, exchange, world_size=2)
    gradients.arm()
    table[1].square().sum().backward(create_graph=True)
    gradients.on_arrival(0)()
    gradients.start()
    gradients.finish()
    assert table.grad is not None
    assert table.grad[1].tolist() == [1.0, 1.0]  # of 2, divided by the number of ranks


@given(data=st.data(), width=st.integers(1, 6), dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_touched_rows_are_those_with_an_element_that_is_not_zero(
    data: st.DataObject, width: int, dtype: torch.dtype
) -> None:
    rows = data.draw(st.integers(1, 9))
    elements = st.sampled_from([0.0, 0.0, -0.0, 1.0, -1.0, 1e-30, float("nan"), float("inf")])
    values = data.draw(st.lists(elements, min_size=rows * width + 1, max_size=rows * width + 1))
    memory = torch.tensor(values, dtype=dtype)
    whole, shifted = memory[:-1].view(rows, width), memory[1:].view(rows, width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SCANNED_BYTES", data.draw(st.sampled_from([1, 50, 2**20])))
        patch.setattr(module, "_MANY_WORDS", data.draw(st.sampled_from([0.0, 1 / 16, 2.0])))
        for table in (whole, shifted, whole.t().contiguous().t()):
            assert touched_rows(table).tolist() == [row for row in range(rows) if any(map(bool, table[row].tolist()))]


def test_large_tables_are_searched_in_parts_of_limited_size(monkeypatch: pytest.MonkeyPatch) -> None:
    table, sizes, search = torch.ones(2**16, 64), [], module._touched_in

    def recorded(block: torch.Tensor) -> torch.Tensor:
        sizes.append(block.nbytes)
        return search(block)

    monkeypatch.setattr(module, "_touched_in", recorded)
    assert torch.equal(touched_rows(table), torch.arange(len(table)))
    assert sum(sizes) == table.nbytes
    assert max(sizes) <= table.nbytes / 4
