"""One rank's part in flows that run at the same time: send all it can, count what arrives."""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from lightning_autosync.cluster import PAYLOAD_SHARE
from lightning_autosync.measure.emulation.throughput import bytes_received

CHUNK = 128 * 1024
TAIL = 0.08
"""Seconds that senders go on after the window, so that ranks that began late still count under full load."""
OPENING = 512 * 1024
"""Payload bytes at the beginning of a flow by which the burst is told."""
_RESET = struct.pack("ii", 1, 0)
"""``struct linger``: close at once and forget what is unsent."""


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
