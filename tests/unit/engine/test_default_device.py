"""Host memory stays host memory where the user's script has set another default device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lightning_autosync.engine.row_gradients import touched_rows
from lightning_autosync.hybrid.execution.random_streams import RandomStreams
from lightning_autosync.plan import Consistency
from lightning_autosync.plan.codecs.powersgd import low_rank_layout
from lightning_autosync.relaxed.model_state import FlatView
from lightning_autosync.relaxed.outer_updates import make_outer


@pytest.fixture(autouse=True)
def other_device() -> Iterator[None]:
    with torch.device("meta"):
        yield


def test_copies_of_models() -> None:
    flat = FlatView([torch.ones(2, 3, device="cpu"), 4]).pack()
    assert flat.tolist() == [1.0] * 6 + [0.0] * 4


@pytest.mark.parametrize("outer", ["slowmo", "diloco", "bmuf", "easgd"])
def test_outer_updates(outer: str) -> None:
    update = make_outer(Consistency(mode="periodic", period=2, outer=outer), [2, 1], torch.float64)
    model = torch.ones(3, dtype=torch.float64, device="cpu")
    update.begin(model)
    assert update.update(model, model, 2, [0.1, 0.1]).tolist() == [1.0] * 3


def test_rows_of_an_empty_table() -> None:
    table = torch.zeros(0, 3, device="cpu")
    assert touched_rows(table).tolist() == []
    assert table.index_select(0, touched_rows(table)).shape == (0, 3)


def test_each_draw_of_a_pass_is_another_one() -> None:
    streams = RandomStreams(1, (0,), torch.device("cpu"))
    drawn = []
    with streams.forward():
        for _ in range(2):
            with streams.shared(("full",), 0.5):
                drawn.append(torch.rand(4, device="cpu").tolist())
    assert drawn[0] != drawn[1]


def test_factors_of_low_rank() -> None:
    from lightning_autosync.engine.exchanges.low_rank import LowRankExchange

    assert low_rank_layout([(4, 4)], 1)
    exchange = LowRankExchange.__new__(LowRankExchange)
    exchange._second_buffer = torch.zeros(4, device="cpu")
    exchange._draw_factors()
    assert bool(exchange._second_buffer.any())


def test_buffers_of_gradients() -> None:
    from lightning_autosync.engine.resources import Resources

    resources = Resources.__new__(Resources)
    resources._rest = lambda: None
    zeros = resources._zeros(5, torch.float32, torch.device("cpu"))
    assert zeros.tolist() == [0.0] * 5
