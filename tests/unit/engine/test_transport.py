"""The transport alone: framing, urgency, foreign peers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_autosync.engine.exchanges.trees import TransportSteps
from lightning_autosync.engine.transport import _HEADER, DOWN, UP, Frame, Peer, Transport, _Connection
from lightning_autosync.errors import ExchangeError


class Inbox:
    """Collects frames."""

    def __init__(self, expected: int) -> None:
        self.frames: list[tuple[int, bytes]] = []
        self.error: ExchangeError | None = None
        self.full = threading.Event()
        self.departures: list[tuple[int, int]] = []
        self.completed = 4
        self._expected = expected
        self._buffer = bytearray()

    def destination(self, peer: int, frame: Frame) -> memoryview:
        self._buffer = bytearray(frame.size)
        return memoryview(self._buffer)

    def arrived(self, peer: int, frame: Frame) -> None:
        self.frames.append((frame.piece, bytes(self._buffer)))
        if len(self.frames) == self._expected:
            self.full.set()

    def left(self, peer: int, step: int) -> None:
        self.departures.append((peer, step))
        self.full.set()

    def failed(self, error: ExchangeError) -> None:
        self.error = error
        self.full.set()


@pytest.fixture
def pair() -> Iterator[tuple[Transport, Transport]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    transports = Transport({Peer(1): one}), Transport({Peer(0): other}, rates={Peer(0): (1e9, 1e9)})
    yield transports
    for transport in transports:
        transport.close()


def send(transport: Transport, peer: int, frames: list[tuple[int, bytes, float]], channel: int = 0) -> None:
    def queue() -> None:
        for piece, payload, urgency in frames:
            frame = Frame(channel, 1, 0, piece, UP, len(payload))
            transport.send(Peer(peer), frame, memoryview(payload), (urgency,))

    transport.submit(queue)


def test_frames_of_all_sizes_arrive_whole(pair: tuple[Transport, Transport]) -> None:
    payloads = [bytes([size % 251]) * size for size in (0, 1, 23, 24, 25, 4096, 1_000_000, 0, 7)]
    inbox = Inbox(len(payloads))
    pair[1].register(0, inbox)
    send(pair[0], 1, [(piece, payload, 0.0) for piece, payload in enumerate(payloads)])
    assert inbox.full.wait(10)
    assert inbox.frames == list(enumerate(payloads))
    assert pair[0].bytes_sent > sum(map(len, payloads))


def test_urgent_frames_overtake(pair: tuple[Transport, Transport]) -> None:
    inbox = Inbox(31)
    pair[1].register(0, inbox)
    bulk = [(piece, bytes(1_000_000), 5.0) for piece in range(30)]
    send(pair[0], 1, [*bulk, (99, b"urgent", 0.0)])
    assert inbox.full.wait(30)
    pieces = [piece for piece, _ in inbox.frames]
    assert pieces.index(99) < 15
    assert [piece for piece in pieces if piece != 99] == list(range(30))


def test_queues_are_limited_again_by_the_round_trips_of_the_first_steps() -> None:
    """A connection that was opened beside other data has seen long round trips, and so got a large buffer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    sender, end = Transport({Peer(1): one}, rates={Peer(1): (1e6, 1e6)}), Transport({Peer(0): other})
    with closing(sender), closing(end):
        usual, sizes = _send_buffer(one), []
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * usual)
        for step in range(1, 6):
            inbox = Inbox(1)
            end.register(0, inbox)
            frame = Frame(0, step, 0, 0, UP, 4)
            sender.submit(partial(sender.send, Peer(1), frame, memoryview(b"data"), (0.0,)))
            assert inbox.full.wait(10)
            sizes.append(_send_buffer(one))
    assert sizes[0] > usual
    assert sizes[1:] == [usual] * 4


def _send_buffer(connection: socket.socket) -> int:
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def test_a_channel_that_nobody_knows_breaks_the_transport(pair: tuple[Transport, Transport]) -> None:
    inbox = Inbox(1)
    pair[1].register(0, inbox)
    send(pair[0], 1, [(0, b"?", 0.0)], channel=7)
    assert inbox.full.wait(10)
    assert "channel 7, which is not in the schedule" in str(inbox.error)


def test_a_lost_peer_fails_every_receiver() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    transport = Transport({Peer(0): other})
    inboxes = [Inbox(1), Inbox(1)]
    for channel, inbox in enumerate(inboxes):
        transport.register(channel, inbox)
    one.close()
    for inbox in inboxes:
        assert inbox.full.wait(10)
        assert "lost the connection to rank 0" in str(inbox.error)
    assert transport.error is inboxes[0].error
    transport.close()


def test_a_peer_that_leaves_says_how_far_it_came(pair: tuple[Transport, Transport]) -> None:
    inboxes = [Inbox(10), Inbox(10)]
    for transport, inbox in zip(pair, inboxes, strict=True):
        transport.register(0, inbox)
    send(pair[0], 1, [(0, bytes(3_000_000), 0.0)])
    pair[0].close()
    assert inboxes[1].full.wait(10)
    assert inboxes[1].departures == [(0, 4)]
    assert [len(payload) for _, payload in inboxes[1].frames] == [3_000_000]  # what was queued came first
    assert inboxes[1].error is None
    assert pair[1].error is None


@pytest.mark.parametrize("count", range(1, 40))
def test_empty_frames_are_not_stranded(pair: tuple[Transport, Transport], count: int) -> None:
    inbox = Inbox(count)
    pair[1].register(0, inbox)
    send(pair[0], 1, [(piece, b"", 0.0) for piece in range(count)])
    assert inbox.full.wait(5)


class Trickle:
    """A socket that hands out a stream in parts of ``size`` bytes, one for each call."""

    def __init__(self, stream: bytes, size: int) -> None:
        self._stream, self._size = stream, size

    def recvmsg_into(self, buffers: list[memoryview]) -> tuple[int]:
        part = self._stream[: min(self._size, sum(map(len, buffers)))]
        if not part:
            raise BlockingIOError
        self._stream, count = self._stream[len(part) :], len(part)
        for buffer in buffers:
            taken, part = part[: len(buffer)], part[len(buffer) :]
            buffer[: len(taken)] = taken
        return (count,)


@pytest.mark.parametrize("size", [1, 27, 28, 29, 100])
def test_frames_may_arrive_in_parts_of_any_size(size: int) -> None:
    payloads = [b"", b"a", bytes(range(60)), b"", bytes(30)]
    stream = b"".join(
        _HEADER.pack(0, 1, 0, piece, UP, len(payload)) + payload for piece, payload in enumerate(payloads)
    )
    inbox, transport = Inbox(len(payloads)), Transport({})
    transport.register(0, inbox)
    peer = _Connection(Peer(0), Trickle(stream, size))  # type: ignore[arg-type]
    for _ in stream:
        transport._read(peer)
    transport.close()
    assert inbox.frames == list(enumerate(payloads))


@pytest.mark.parametrize("sums_first", [False, True])
def test_contributions_leave_before_more_urgent_complete_sums_only_if_sums_come_first(sums_first: bool) -> None:
    sent: list[tuple[tuple[float, ...], int]] = []

    def send(_: Peer, frame: Frame, __: memoryview, urgency: tuple[float, ...], ___: Any) -> None:
        sent.append((urgency, frame.phase))

    for priority, phase in ((1, DOWN), (0, UP)):
        message: Any = SimpleNamespace(name="layer", priority=priority)
        transport: Any = SimpleNamespace(send=send)
        steps = TransportSteps(transport, 0, message, 1.0)
        steps.sums_first = sums_first
        steps._send(Peer(1), (0, 0, phase), memoryview(b""))
    assert [phase for _, phase in sorted(sent)] == ([UP, DOWN] if sums_first else [DOWN, UP])
