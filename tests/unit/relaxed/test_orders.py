"""Calls left for another thread."""

from __future__ import annotations

import select

import pytest

from lightning_autosync.errors import ExchangeError
from lightning_autosync.relaxed.transport.event_loop import Orders


def _is_woken(orders: Orders) -> bool:
    return bool(select.select([orders.woken], [], [], 0)[0])


def test_calls_behind_one_that_raises_are_made_at_the_next_wake() -> None:
    def fail() -> None:
        raise ValueError("no luck")

    orders, made = Orders(), []
    try:
        orders.submit(fail)
        orders.submit(lambda: made.append(1))
        with pytest.raises(ValueError, match="no luck"):
            orders.obey()
        assert made == []
        assert _is_woken(orders)
        orders.obey()
        assert made == [1]
        assert not _is_woken(orders)
    finally:
        orders.close()


def test_nothing_can_be_left_in_a_closed_queue() -> None:
    orders, made = Orders(), []
    orders.submit(lambda: made.append(0))
    (left,) = orders.close()
    with pytest.raises(ExchangeError, match="the mesh is closed"):
        orders.submit(lambda: made.append(1))
    assert made == []
    left()
    assert made == [0]
