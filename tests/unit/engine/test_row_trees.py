"""Rows that are merged along trees, seen by one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from lightning_autosync.engine.exchanges.rows import Rows, RowTreeExchange
from lightning_autosync.engine.transport import UP, Frame
from lightning_autosync.plan import Compressor, Message, Round, Tree, TreeTransfer

TABLE, WIDTH = 10, 2


class Alone:
    """A transport without peers: calls run at once."""

    error = None

    def register(self, channel: int, receiver: Any) -> None:
        return None

    def submit(self, call: Callable[[], None]) -> None:
        call()

    def send(self, *_: Any) -> None:
        return None


def rows(*indices: int) -> Rows:
    return Rows(torch.tensor(indices), torch.ones(len(indices), WIDTH), 1)


def test_each_set_of_rows_is_unpacked_once() -> None:
    """Unpacking a small set costs the transport's thread about as much as adding it."""
    star = Tree((-1, 0, 0))
    transfer = TreeTransfer(0, TABLE * WIDTH, star, star, 4)
    whole = Round(TABLE * WIDTH, (transfer,))
    message = Message(0, "table", ("table",), TABLE * WIDTH, "float32", 0, TABLE, Compressor(), 0, (whole,))
    exchange = RowTreeExchange(Alone(), 0, 0, message, WIDTH, torch.float32, 1.0)  # type: ignore[arg-type]
    with mock.patch.object(Rows, "unpacked", side_effect=Rows.unpacked) as unpacked:
        exchange.start(rows(1, 2))
        for peer, own in ((2, rows(2, 9)), (1, rows(2, 4))):
            wire = own.packed(TABLE)
            frame = Frame(0, 1, 0, 0, UP, wire.numel())
            exchange.destination(peer, frame)[:] = memoryview(wire.numpy())
            exchange.arrived(peer, frame)
    assert unpacked.call_count == 2
    total = exchange._paths[0].total
    assert total is not None
    assert total.indices.tolist() == [1, 2, 4, 9]
    assert total.values[:, 0].tolist() == [1, 3, 1, 1]
