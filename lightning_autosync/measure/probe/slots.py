"""One rank's part in several transfers that follow each other by the clock, over connections that stay open."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from lightning_autosync.measure.probe.flows import CHUNK, wire_rate
from lightning_autosync.measure.tcp_info import bytes_received


@dataclass(frozen=True)
class Slot:
    """One rank's part in one transfer.

    Attributes:
        targets: peers to which the rank sends, with limits on the bytes in flight; None leaves the limit to TCP.
        sources: peers from which it receives.
        head: seconds at the beginning that are not counted. Data of the slot before and bursts pass in it.
        window: seconds that are counted.
        tail: seconds for which senders continue, so that ranks that began late measure under full load too.
    """

    targets: Mapping[int, int | None]
    sources: Sequence[int]
    head: float
    window: float
    tail: float

    @property
    def seconds(self) -> float:
        """Seconds of the slot."""
        return self.head + self.window + self.tail


def run_slots(sockets: Mapping[int, socket.socket], slots: Sequence[Slot]) -> list[dict[int, float]]:
    """Run slots one after the other; returns for each slot the bytes/s on the wire by source.

    Ranks call this at about the same time, and then keep together by their clocks.

    Raises:
        ConnectionError: a peer closed its connection.
    """
    with selectors.DefaultSelector() as selector:
        for peer, connection in sockets.items():
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, CHUNK)
            selector.register(connection, selectors.EVENT_READ, peer)
        begin = time.perf_counter()
        found = []
        for slot in slots:
            found.append(_run(selector, sockets, slot, begin))
            begin += slot.seconds
    return found


def _run(
    selector: selectors.BaseSelector, sockets: Mapping[int, socket.socket], slot: Slot, begin: float
) -> dict[int, float]:
    for peer, limit in slot.targets.items():
        if limit is not None:
            sockets[peer].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limit)
        selector.modify(sockets[peer], selectors.EVENT_READ | selectors.EVENT_WRITE, peer)
    opens, closes = begin + slot.head, begin + slot.head + slot.window
    _exchange(selector, sockets, opens)
    first = _counts(sockets, slot.sources)
    _exchange(selector, sockets, closes)
    last = _counts(sockets, slot.sources)
    _exchange(selector, sockets, begin + slot.seconds)
    for peer in slot.targets:
        selector.modify(sockets[peer], selectors.EVENT_READ, peer)
    return {source: wire_rate(first[source], last[source]) for source in slot.sources}


def _exchange(selector: selectors.BaseSelector, sockets: Mapping[int, socket.socket], deadline: float) -> None:
    """Send and receive until a time of `time.perf_counter`."""
    chunk, buffer = memoryview(bytes(CHUNK)), bytearray(CHUNK)
    while (now := time.perf_counter()) < deadline:
        for key, events in selector.select(deadline - now):
            connection = sockets[key.data]
            with suppress(BlockingIOError):
                if events & selectors.EVENT_WRITE:
                    connection.send(chunk)
                if events & selectors.EVENT_READ and not connection.recv_into(buffer):
                    raise ConnectionError(f"rank {key.data} closed its connection")


def _counts(sockets: Mapping[int, socket.socket], sources: Sequence[int]) -> dict[int, tuple[float, int]]:
    """The time, and the bytes that the kernel has received from each source, even if nobody has read them."""
    return {source: (time.perf_counter(), bytes_received(sockets[source])) for source in sources}
