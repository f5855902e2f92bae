"""Round trips: a few bytes there and back over a connection, one after the other or at even intervals.

The clocks of two hosts cannot be compared, so a time one way is half of one there and back.
"""

from __future__ import annotations

import select
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_autosync.measure.workers.errors import LaunchError

_PING = b"\0" * 8
_INTERVAL = 0.02
"""Seconds between messages over a full way. Few enough are under way at once that TCP holds none of them back."""


@dataclass(frozen=True)
class RoundTrip:
    """Seconds there and back of a few bytes: the least and the median."""

    least: float
    median: float

    @classmethod
    def of(cls, times: Sequence[float]) -> RoundTrip:
        """Of at least one."""
        return cls(min(times), statistics.median(times))


def ping(connection: socket.socket, count: int, begins: bool) -> list[float]:
    """Seconds of each of ``count`` trips, one after the other; the other end calls this too and does not begin."""
    times: list[float] = []
    for _ in range(count):
        start = time.perf_counter()
        if begins:
            connection.sendall(_PING)
        _receive(connection)
        if not begins:
            connection.sendall(_PING)
        times.append(time.perf_counter() - start)
    return times


def ping_for(connection: socket.socket, seconds: float, timeout: float) -> list[float]:
    """Seconds of each trip of messages sent at even intervals for so long, at least one; the other end calls `echo`.

    Raises:
        LaunchError: no answer came for ``timeout`` seconds, or the other end is gone.
    """
    times: list[float] = []
    sent: deque[float] = deque()
    begin = due = time.perf_counter()
    answered = 0
    while due < begin + seconds or sent:
        now = time.perf_counter()
        if due <= now and due < begin + seconds:
            connection.sendall(_PING)
            sent.append(now)
            due = now + _INTERVAL
        elif select.select([connection], [], [], due - now if due < begin + seconds else timeout)[0]:
            answered += len(_some(connection))
            while answered >= len(_PING):
                times.append(time.perf_counter() - sent.popleft())
                answered -= len(_PING)
        elif due >= begin + seconds:
            raise LaunchError(f"probe: a rank does not answer within {timeout:g} s")
    return times


def echo(connection: socket.socket) -> None:
    """Send back whatever comes until the other end has no more."""
    while part := connection.recv(1024):
        connection.sendall(part)


def loop(count: int) -> list[float]:
    """Seconds of trips between two threads over the loopback interface: what it takes them to wake, without a wire."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with near, far:
        for connection in (near, far):
            send_at_once(connection)
        answering = threading.Thread(target=ping, args=(far, count, False))
        answering.start()
        times = ping(near, count, begins=True)
        answering.join()
    return times


def send_at_once(connection: socket.socket) -> None:
    """Let small messages leave without waiting for others."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _receive(connection: socket.socket) -> None:
    left = len(_PING)
    while left:
        left -= len(_some(connection, left))


def _some(connection: socket.socket, amount: int = 1024) -> bytes:
    part = connection.recv(amount)
    if not part:
        raise LaunchError("probe: a rank closed its connection")
    return part
