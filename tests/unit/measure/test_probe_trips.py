"""Round trips over a connection of this process, without a network."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from lightning_autosync.measure.probe.flows import RoundTrip, echo, loop, ping_for
from lightning_autosync.measure.workers import LaunchError

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def beside(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def test_every_message_sent_comes_back(pair: Pair) -> None:
    near, far = pair
    answering = beside(lambda: echo(far))
    times = ping_for(near, seconds=0.2, timeout=30.0)
    near.shutdown(socket.SHUT_WR)
    answering.join()
    assert 1 <= len(times) <= 11
    assert all(time > 0 for time in times)


def test_trips_are_told_apart_where_answers_come_late_and_in_pieces(pair: Pair) -> None:
    near, far = pair

    def answer() -> None:
        """Once three messages are there, all their answers but a half at once, then the rest."""
        first = b""
        while len(first) < 24:
            first += far.recv(1024)
        far.sendall(first[:20])
        far.sendall(first[20:])
        echo(far)

    answering = beside(answer)
    times = ping_for(near, seconds=1.0, timeout=30.0)
    near.shutdown(socket.SHUT_WR)
    answering.join()
    assert len(times) >= 3
    # The first two waited for the third; messages are 20 ms apart.
    assert times[0] >= 0.039
    assert times[1] >= 0.019


def test_a_rank_that_does_not_answer_is_told(pair: Pair) -> None:
    with pytest.raises(LaunchError, match=r"did not answer within 0\.01 s"):
        ping_for(pair[0], seconds=0.01, timeout=0.01)


def test_a_rank_that_is_gone_is_told(pair: Pair) -> None:
    pair[1].shutdown(socket.SHUT_WR)
    with pytest.raises(LaunchError, match="closed its connection"):
        ping_for(pair[0], seconds=0.2, timeout=30.0)


def test_threads_wake_each_other() -> None:
    times = loop(10)
    assert len(times) == 10
    assert RoundTrip.of([3.0, 1.0, 2.0]) == RoundTrip(least=1.0, median=2.0)
