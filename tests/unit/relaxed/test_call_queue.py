"""Calls left for another thread."""

from __future__ import annotations

import select

import pytest

from lightning_autosync.errors import ExchangeError
from lightning_autosync.relaxed.transport.event_loop import CallQueue


def _is_woken(calls: CallQueue) -> bool:
    return bool(select.select([calls.readable], [], [], 0)[0])


def test_calls_behind_one_that_raises_are_made_at_the_next_wake() -> None:
    def fail() -> None:
        raise ValueError("no luck")

    calls, made = CallQueue(), []
    try:
        calls.submit(fail)
        calls.submit(lambda: made.append(1))
        with pytest.raises(ValueError, match="no luck"):
            calls.run_all()
        assert made == []
        assert _is_woken(calls)
        calls.run_all()
        assert made == [1]
        assert not _is_woken(calls)
    finally:
        calls.close()


def test_nothing_can_be_left_in_a_closed_queue() -> None:
    calls, made = CallQueue(), []
    calls.submit(lambda: made.append(0))
    (left,) = calls.close()
    with pytest.raises(ExchangeError, match="the mesh is closed"):
        calls.submit(lambda: made.append(1))
    assert made == []
    left()
    assert made == [0]
