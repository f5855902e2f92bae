"""What a mesh is made of, without processes: silence limits, links over sockets that break, and who belongs to it."""

from __future__ import annotations

import random
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_autosync.errors import DocumentError, ExchangeError
from lightning_autosync.relaxed.transport import handshake
from lightning_autosync.relaxed.transport.handshake import Answer, Hello
from lightning_autosync.relaxed.transport.heartbeat import HeartbeatSettings, SilenceLimit
from lightning_autosync.relaxed.transport.membership import Membership, Status
from lightning_autosync.relaxed.transport.messages import Mail, OutgoingMessage, Sent, cut, encode_head
from lightning_autosync.relaxed.transport.stream import FrameStream, ProtocolError

SETTINGS = HeartbeatSettings(interval=0.5, shortest=1.0, longest=30.0)


@given(st.lists(st.floats(0.01, 100.0), max_size=150))
def test_the_silence_limit_keeps_its_bounds(intervals: list[float]) -> None:
    limit, now = SilenceLimit(SETTINGS), 0.0
    for interval in intervals:
        now += interval
        limit.beat(now)
        assert SETTINGS.shortest <= limit.seconds <= SETTINGS.longest


def test_irregular_beats_are_borne_longer() -> None:
    regular, irregular = SilenceLimit(SETTINGS), SilenceLimit(SETTINGS)
    for beat in range(100):
        regular.beat(0.5 * beat)
        irregular.beat(0.5 * beat + 0.4 * (beat % 2))
    assert SETTINGS.interval < regular.seconds < irregular.seconds < SETTINGS.longest


def test_a_pause_of_ones_own_teaches_nothing() -> None:
    limit = SilenceLimit(SETTINGS)
    for beat in range(10):
        limit.beat(0.5 * beat)
    before = limit.seconds
    limit.pause()
    limit.beat(1000.0)
    assert limit.seconds == before


@pytest.mark.parametrize("wrong", [{"interval": 0.0}, {"shortest": 40.0}, {"phi": 0.0}, {"redial": 0.0}])
def test_heartbeat_settings_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(DocumentError, match="heartbeat"):
        HeartbeatSettings(**wrong)


@given(st.lists(st.binary(max_size=50), max_size=20), st.integers(1, 64))
def test_cutting_loses_no_byte(parts: list[bytes], size: int) -> None:
    pieces = [b"".join(piece) for piece in cut([memoryview(part) for part in parts], size)]
    assert b"".join(pieces) == b"".join(parts)
    assert all(len(piece) == size for piece in pieces[:-1])


class _Pair:
    """Two links over a socket pair that can be replaced."""

    def __init__(self, largest: int = 1 << 24) -> None:
        self.inboxes: tuple[list[Mail], list[Mail]] = ([], [])
        self.streams = tuple(
            FrameStream(1 - side, lambda *_: None, self.inboxes[side].append, largest) for side in (0, 1)
        )
        self.reconnect(first=True)

    def reconnect(self, *, first: bool = False) -> None:
        if not first:
            for connection in self.sockets:
                connection.close()
            for side in (0, 1):
                self.streams[side].resume(self.streams[1 - side].received)
        self.sockets = socket.socketpair()
        for connection in self.sockets:
            connection.setblocking(False)

    def move(self, side: int, most: int) -> None:
        self.streams[side].write(self.sockets[side], most)
        self.streams[1 - side].read(self.sockets[1 - side], most)

    def settle(self) -> None:
        for _ in range(2000):
            for side in (0, 1):
                self.streams[side].beat_due = True
                self.move(side, 1 << 20)
            if all(stream.idle for stream in self.streams):
                return
        raise AssertionError("the links did not come to rest")


def _message(number: int, payload: bytes) -> OutgoingMessage:
    return OutgoingMessage(encode_head("count", {"number": number}), [memoryview(payload)] if payload else [], Sent())


@pytest.mark.parametrize("seed", range(5))
def test_a_link_loses_and_repeats_nothing_however_often_it_breaks(seed: int) -> None:
    drawn, pair = random.Random(seed), _Pair()
    sent: list[OutgoingMessage] = []
    for number in range(40):
        size = drawn.choice([0, 10, 70_000, 700_000])
        message = _message(number, drawn.randbytes(size))
        sent.append(message)
        pair.streams[0].post(message)
        for _ in range(drawn.randrange(4)):
            pair.move(drawn.randrange(2), drawn.randrange(1, 400_000))
        if drawn.random() < 0.5:
            pair.reconnect()
    pair.settle()
    found = {mail.header["number"]: bytes(mail.payload) for mail in pair.inboxes[1]}
    assert len(pair.inboxes[1]) == len(sent)
    assert found == {number: b"".join(message.payload) for number, message in enumerate(sent)}
    assert all(message.sent.done for message in sent)


def test_small_messages_overtake_large_ones() -> None:
    pair = _Pair()
    pair.streams[0].post(_message(0, bytes(4_000_000)))
    pair.move(0, 100_000)
    pair.streams[0].post(_message(1, b"urgent"))
    pair.settle()
    assert [mail.header["number"] for mail in pair.inboxes[1]] == [1, 0]


def test_a_large_payload_is_the_senders_own_only_once_it_has_arrived() -> None:
    pair, message = _Pair(), _message(0, bytes(1_000_000))
    pair.streams[0].post(message)
    pair.streams[0].write(pair.sockets[0], 1 << 20)
    assert not message.sent.done
    pair.settle()
    assert message.sent.done


def test_a_cancelled_message_is_not_begun() -> None:
    pair, first, second = _Pair(), _message(0, bytes(1_000_000)), _message(1, bytes(1_000_000))
    for message in (first, second):
        pair.streams[0].post(message)
        pair.move(0, 1000)
        message.sent.cancel()
    pair.settle()
    assert [mail.header["number"] for mail in pair.inboxes[1]] == [0]
    assert second.sent.done


def test_a_large_message_moves_with_every_confirmed_piece() -> None:
    pair, message = _Pair(), _message(0, bytes(1_000_000))
    moves: list[int] = []
    message.sent.move = lambda: moves.append(1)  # type: ignore[method-assign]
    pair.streams[0].post(message)
    pair.settle()
    assert len(moves) == 3


def test_too_large_a_message_is_refused_before_memory_is_taken() -> None:
    pair = _Pair(largest=100_000)
    pair.streams[0].post(_message(0, bytes(100_001)))
    pair.streams[0].write(pair.sockets[0], 1 << 20)
    with pytest.raises(ProtocolError, match="announced a message"):
        pair.streams[1].read(pair.sockets[1], 1 << 20)


@given(st.binary(min_size=13, max_size=200))
def test_noise_never_breaks_a_link_in_another_way(noise: bytes) -> None:
    pair = _Pair(largest=1000)
    pair.sockets[0].sendall(noise)
    try:
        pair.streams[1].read(pair.sockets[1], 1 << 20)
    except ProtocolError:
        return
    finally:
        for connection in pair.sockets:
            connection.close()


def test_headers_are_json() -> None:
    with pytest.raises(ExchangeError, match="not JSON"):
        encode_head("kind", {"value": object()})
    with pytest.raises(ExchangeError, match="not JSON"):
        encode_head("kind", {"value": float("nan")})


def _hello(rank: int, incarnation: int, purpose: str, target: int = 0) -> Hello:
    return Hello(purpose, rank, incarnation, target, 0, "host", 1)


def test_what_greetings_say_survives_the_way_and_nonsense_does_not() -> None:
    hello, answer = _hello(1, 1, handshake.JOIN), Answer(handshake.WELCOME, 1, 2, {"3": 1})
    assert handshake.decode_hello(handshake.encode(hello)) == hello
    assert handshake.decode_answer(handshake.encode(answer)) == answer
    with pytest.raises(ExchangeError):
        handshake.decode_hello(handshake.encode(answer))
    for text in (
        b"GET / HTTP/1.1",
        b"\xff",
        b"[" * 1000,
        b"{}",
        b"[]",
        b'["welcome", 1, 2, {"x": 1}]',
        b'["w", 1, true, {}]',
    ):
        with pytest.raises(ExchangeError):
            handshake.decode_answer(text)


@pytest.mark.parametrize(
    ("hello", "verdict"),
    [
        (_hello(1, 2, handshake.JOIN), handshake.WELCOME),
        (_hello(1, 1, handshake.JOIN), handshake.WAIT),
        (_hello(1, 1, handshake.RESUME, target=1), handshake.WELCOME),
        (_hello(1, 1, handshake.RESUME, target=2), handshake.STALE),
        (_hello(1, 2, handshake.RESUME, target=1), handshake.EXPELLED),
        (_hello(1, 1, handshake.PROBE, target=1), handshake.WAIT),
        (_hello(1, 0, handshake.JOIN), handshake.EXPELLED),
        (_hello(7, 1, handshake.JOIN), handshake.EXPELLED),
        (_hello(0, 1, handshake.JOIN), handshake.EXPELLED),
    ],
)
def test_callers_are_judged_by_their_incarnation(hello: Hello, verdict: str) -> None:
    members = Membership(0, 3, incarnation=1)
    members.connected(1, 1)
    assert members.judge(hello) == verdict


def test_a_lost_peer_cannot_resume_but_can_join_anew() -> None:
    members = Membership(0, 2, incarnation=1)
    members.connected(1, 1)
    members.gone(1, Status.LOST, "silent")
    assert members.live == {0}
    assert members.judge(_hello(1, 1, handshake.RESUME, target=1)) == handshake.EXPELLED
    assert members.judge(_hello(1, 2, handshake.JOIN)) == handshake.WELCOME


def test_a_call_to_an_address_of_the_past_does_not_keep_a_newcomer_waiting() -> None:
    members = Membership(0, 3, incarnation=1)
    members.connecting[1] = ("host", 99)
    assert members.judge(_hello(1, 2, handshake.JOIN)) == handshake.WELCOME
    members.connecting[1] = ("host", 1)
    assert members.judge(_hello(1, 2, handshake.JOIN)) == handshake.WAIT


def test_who_comes_back_must_meet_whom_others_count_as_live() -> None:
    members = Membership(3, 4, incarnation=2)
    members.connected(0, 1)
    members.learn({"1": 1, "2": 3})
    assert members.unmet == [1, 2]
    members.connected(1, 1)
    assert members.unmet == [2]
    # Of an earlier life of rank 2 a loss means nothing.
    assert not members.forget(2, 2)
    assert members.unmet == [2]
    assert members.forget(2, 3)
    assert members.unmet == []


def test_of_two_that_cannot_talk_the_higher_rank_leaves() -> None:
    views = {rank: Membership(rank, 4, incarnation=1) for rank in range(4)}
    for rank, view in views.items():
        for peer in set(range(4)) - {rank}:
            view.connected(peer, 1)
    # 1 and 2 lost each other; all hear of it from both.
    assert views[0].believes(1, 2, 1)
    assert views[3].believes(1, 2, 1)
    assert not views[0].believes(2, 1, 1)
    assert not views[3].believes(2, 1, 1)
    assert not views[1].believes(2, 1, 1)
    assert views[2].believes(1, 2, 1)
    # A report of an earlier incarnation is void.
    assert not views[0].believes(1, 2, 0)
