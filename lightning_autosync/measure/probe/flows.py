"""One rank's part in flows and round trips over TCP connections between ranks."""

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
from lightning_autosync.engine.connections import listen
from lightning_autosync.measure.errors import LaunchError
from lightning_autosync.measure.tcp_info import bytes_received

CHUNK = 128 * 1024
TAIL = 0.08
"""Seconds for which senders continue after the window, so that ranks that began late measure under full load too."""
OPENING = 512 * 1024
"""Payload bytes at the beginning of a flow that determine its burst."""
_RESET = struct.pack("ii", 1, 0)
"""``struct linger``: close at once and discard unsent data, so that it does not load the links of the next transfer."""


@dataclass(frozen=True)
class Arrival:
    """What arrived from one peer.

    Attributes:
        rate: bytes/s on the wire during the window.
        halves: bytes/s on the wire during each half of the window.
        burst: bytes on the wire that arrived in excess of that rate at the very beginning; None if too few arrived.
    """

    rate: float
    halves: tuple[float, float]
    burst: float | None


def stream(
    sockets: Mapping[int, socket.socket], targets: Iterable[int], sources: Iterable[int], head: float, window: float
) -> dict[int, Arrival]:
    """Send to ``targets`` and receive from ``sources`` for ``head + window`` seconds; returns arrivals by source.

    The head is not counted: in it the token buckets' bursts pass and TCP finds its rate. The sockets are closed.
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
                except ConnectionError:  # the peer has finished and reset the connection
                    selector.unregister(connection)
            if time.perf_counter() >= deadlines[0]:
                deadlines.pop(0)
                for watch in watches.values():
                    watch.mark()
    for connection in sockets.values():
        discard(connection)
    return {source: watch.arrival() for source, watch in watches.items()}


def discard(connection: socket.socket) -> None:
    """Close a connection and discard its unsent data."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    connection.close()


class _Watch:
    """Byte counts of one incoming flow."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._marks: list[tuple[float, int]] = []
        self._arrived = 0
        self._first = 0.0
        self._opened: float | None = None

    def count(self, amount: int) -> None:
        """Record that ``amount`` bytes were read."""
        now = time.perf_counter()
        if self._arrived == 0:
            self._first = now
        self._arrived += amount
        if self._opened is None and self._arrived >= OPENING:
            self._opened = now - self._first
            self._opening = self._arrived

    def mark(self) -> None:
        """Record the kernel's byte count: at the beginning, the middle and the end of the window.

        Unlike the bytes read so far, it includes bytes that this process was too late to read.
        """
        self._marks.append((time.perf_counter(), bytes_received(self._connection)))

    def arrival(self) -> Arrival:
        first, middle, last, *_ = self._marks
        rate = wire_rate(first, last)
        halves = wire_rate(first, middle), wire_rate(middle, last)
        if self._opened is None:
            return Arrival(rate, halves, None)
        return Arrival(rate, halves, self._opening / PAYLOAD_SHARE - rate * self._opened)


def wire_rate(earlier: tuple[float, int], later: tuple[float, int]) -> float:
    """Bytes/s on the wire between two counts: times, and payload bytes received."""
    return (later[1] - earlier[1]) / PAYLOAD_SHARE / (later[0] - earlier[0])


_PING = b"\0" * 8
_INTERVAL = 0.02
"""Seconds between messages over a loaded route: rare enough that TCP holds none of them back."""


@dataclass(frozen=True)
class RoundTrip:
    """Round-trip seconds of a few bytes: the least and the median."""

    least: float
    median: float

    @classmethod
    def of(cls, times: Sequence[float]) -> RoundTrip:
        """From the seconds of at least one trip."""
        return cls(min(times), statistics.median(times))


def ping(connection: socket.socket, count: int, begins: bool) -> list[float]:
    """Seconds of each of ``count`` consecutive trips. Both ends call this, one of them with ``begins``."""
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
    """Round-trip seconds of messages sent at even intervals for ``seconds``, at least one. The other end calls `echo`.

    Raises:
        LaunchError: no answer came for ``timeout`` seconds, or the other end closed the connection.
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
            raise LaunchError(f"probe: a rank did not answer within {timeout:g} s")
    return times


def echo(connection: socket.socket) -> None:
    """Send back everything received until the other end has no more to send."""
    while part := connection.recv(1024):
        connection.sendall(part)


def loop(count: int) -> list[float]:
    """Round-trip seconds between two threads over the loopback interface: their wake-up time, without a wire."""
    with listen("127.0.0.1") as server:
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
    """Disable Nagle's algorithm, so that small messages leave at once."""
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
