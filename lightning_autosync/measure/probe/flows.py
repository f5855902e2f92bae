"""One rank's part in flows and round trips between ranks, over TCP connections."""

from __future__ import annotations

import select
import selectors
import socket
import statistics
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from lightning_autosync.cluster import PAYLOAD_SHARE
from lightning_autosync.measure.errors import LaunchError
from lightning_autosync.measure.tcp_info import bytes_received

CHUNK = 128 * 1024
TAIL = 0.08
"""Seconds that senders go on after the window, so that the windows of ranks that began late have full load, too."""
OPENING = 512 * 1024
"""Payload bytes at the beginning of a flow from which its burst is computed."""
_RESET = struct.pack("ii", 1, 0)
"""``struct linger``: close at once and discard what is not sent yet."""


@dataclass(frozen=True)
class Arrival:
    """What came from one peer.

    Attributes:
        rate: bytes/s on the wire during the window.
        halves: the same during each half of it.
        burst: bytes on the wire that came above that rate at the very beginning; None where too few came.
    """

    rate: float
    halves: tuple[float, float]
    burst: float | None


def stream(
    sockets: Mapping[int, socket.socket], targets: Iterable[int], sources: Iterable[int], head: float, window: float
) -> dict[int, Arrival]:
    """Send to ``targets`` and receive from ``sources`` for ``head + window`` seconds; arrivals by source.

    The head is not counted: in it the token buckets' bursts pass and TCP finds its pace. The sockets are used up.
    """
    watches = {source: _Watch(sockets[source]) for source in sources}
    chunk, buffer = memoryview(bytes(CHUNK)), bytearray(CHUNK)
    targets = set(targets)
    with selectors.DefaultSelector() as selector:
        for peer, connection in sockets.items():
            connection.setblocking(False)
            events = (selectors.EVENT_WRITE if peer in targets else 0) | (
                selectors.EVENT_READ if peer in watches else 0
            )
            if events:
                selector.register(connection, events, peer)
        begin = time.perf_counter()
        deadlines = [begin + head + more for more in (0.0, window / 2, window, window + TAIL)]
        while deadlines:
            for key, events in selector.select(max(0.0, deadlines[0] - time.perf_counter())):
                connection = sockets[key.data]
                try:
                    if events & selectors.EVENT_WRITE:
                        connection.send(chunk)
                    if events & selectors.EVENT_READ:
                        watches[key.data].count(connection.recv_into(buffer))
                except BlockingIOError:
                    continue
                except ConnectionError:  # the peer's time is over
                    selector.unregister(connection)
            if time.perf_counter() >= deadlines[0]:
                deadlines.pop(0)
                for watch in watches.values():
                    watch.mark()
    for connection in sockets.values():
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        connection.close()
    return {source: watch.arrival() for source, watch in watches.items()}


class _Watch:
    """Counts of one incoming flow."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._marks: list[tuple[float, int]] = []
        self._arrived = 0
        self._first = 0.0
        self._opened: float | None = None

    def count(self, amount: int) -> None:
        """Some bytes were read."""
        now = time.perf_counter()
        if self._arrived == 0:
            self._first = now
        self._arrived += amount
        if self._opened is None and self._arrived >= OPENING:
            self._opened = now - self._first
            self._opening = self._arrived

    def mark(self) -> None:
        """The window begins, is half over, or ends."""
        self._marks.append((time.perf_counter(), bytes_received(self._connection)))

    def arrival(self) -> Arrival:
        first, middle, last, *_ = self._marks
        rate = _rate(first, last)
        halves = _rate(first, middle), _rate(middle, last)
        if self._opened is None:
            return Arrival(rate, halves, None)
        return Arrival(rate, halves, self._opening / PAYLOAD_SHARE - rate * self._opened)


def _rate(earlier: tuple[float, int], later: tuple[float, int]) -> float:
    """Bytes/s on the wire between two marks."""
    return (later[1] - earlier[1]) / PAYLOAD_SHARE / (later[0] - earlier[0])


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
