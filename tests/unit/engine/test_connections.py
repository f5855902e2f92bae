"""How a rank waits for its connections."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

from lightning_autosync.engine import connections
from lightning_autosync.engine.connections import _POLL_INTERVAL, _Connector
from lightning_autosync.errors import ExchangeError


def connect(deadline: float) -> float:
    """Seconds in which a rank that nobody calls has connected to a peer."""
    with connections.listen("\0autosync-test-connections") as listener:
        connector = _Connector(listener, secret=b"", rank=0, callers=set(), deadline=time.monotonic() + deadline)
        begin = time.perf_counter()
        try:
            for connection in connector.run({1: ["peer"]}).values():
                connection.close()
        finally:
            connector.close()
        return time.perf_counter() - begin


def test_a_rank_that_nobody_calls_goes_on_as_soon_as_it_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(*_: Any) -> Any:
        time.sleep(0.01)
        return (socket.socket(),)

    monkeypatch.setattr(connections, "connect_with_retries", call)
    assert min(connect(60.0) for _ in range(5)) < _POLL_INTERVAL  # other load may disturb some of them


def test_such_a_rank_does_not_spin_where_a_call_outlasts_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        time.sleep(0.5)
        raise OSError("timed out")

    monkeypatch.setattr(connections, "connect_with_retries", fail)
    begin = time.thread_time()
    with pytest.raises(ExchangeError, match="rank 1 cannot be reached at peer: timed out"):
        connect(0.0)
    assert time.thread_time() - begin < 0.25
