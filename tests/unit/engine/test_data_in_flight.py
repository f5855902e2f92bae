"""How much data a connection keeps in flight."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator

import pytest

from lightning_autosync.engine.connections import limit_queue, tune_connection

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's round-trip times")

SMALLEST = 64 * 1024
SLACK = 2e-3
BUSY = 1.5
"""Factor on a buffer that allows for the round trip of a busy machine."""


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with one, other:
        yield one, other


def buffer(connection: socket.socket) -> float:
    """Bytes of a send buffer, without the overhead that Linux adds to what was asked for."""
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) / 2


def test_one_late_acknowledgement_makes_no_long_queue(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = ends
    other.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)  # acknowledge after 40 ms
    one.send(b"x")
    time.sleep(0.1)
    tune_connection(one, (1e8, 1e8))
    assert 1e8 * SLACK <= buffer(one) < BUSY * 1e8 * SLACK


@pytest.mark.parametrize("rate", [1e6, 1e7, 1e8])
def test_equal_directions_keep_the_slack_or_the_smallest_window_in_flight(
    ends: tuple[socket.socket, socket.socket], rate: float
) -> None:
    for end in ends:
        tune_connection(end, (rate, rate))
        least = max(SMALLEST, rate * SLACK)
        assert 0.99 * least <= buffer(end) < BUSY * least


@pytest.mark.parametrize("ratio", [1.5, 3.0])
def test_both_directions_hold_data_for_the_same_time(ends: tuple[socket.socket, socket.socket], ratio: float) -> None:
    fast, slow = 2e7, 2e7 / ratio
    for tune in (tune_connection, limit_queue):  # when it is opened, and before the next steps
        tune(ends[0], (fast, slow))
        tune(ends[1], (slow, fast))
    seconds = buffer(ends[0]) / fast, buffer(ends[1]) / slow
    assert seconds[0] == pytest.approx(seconds[1], rel=0.2)
    assert buffer(ends[0]) < 2.1 * SMALLEST


def test_the_slow_direction_keeps_some_packets_in_flight(ends: tuple[socket.socket, socket.socket]) -> None:
    tune_connection(ends[1], (2e5, 2e7))
    assert buffer(ends[1]) >= 32 * 1024
