"""How two processes of a mesh meet: one dials and says who it is, the other answers whether it may stay.

Both know the job's secret, or neither hears the other; see `greeting`.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from lightning_autosync.engine import greeting
from lightning_autosync.errors import ExchangeError

_RETRY = 0.05
"""Seconds after which whoever was told to wait asks again."""

JOIN, RESUME, PROBE = "join", "resume", "probe"
"""What a caller wants: a first connection, a new one in place of one that dropped, or only to know how it stands."""

WELCOME, WAIT, STALE, EXPELLED, ENDED = "welcome", "wait", "stale", "expelled", "ended"
"""Answers: connected; the other side will see to it; the caller knew an earlier incarnation; given up; it leaves."""


class Hello(NamedTuple):
    """What a caller says: who it is, under which incarnation, whom it expects (0: anyone), how many frames it has."""

    purpose: str
    rank: int
    incarnation: int
    target: int
    received: int
    host: str
    port: int


class Answer(NamedTuple):
    """What it is told, by which incarnation, which has so many of its frames and counts these peers (by rank, their
    incarnations) as live."""

    verdict: str
    incarnation: int
    received: int
    live: dict[str, int]


def encode(said: Hello | Answer) -> bytes:
    """What is said as it travels."""
    return json.dumps(list(said)).encode()


def decode_hello(text: bytes) -> Hello:
    """What a caller says.

    Raises:
        ExchangeError: it is no hello.
    """
    return Hello(*_decode(text, (str, int, int, int, int, str, int)))


def decode_answer(text: bytes) -> Answer:
    """What it is told.

    Raises:
        ExchangeError: it is no answer.
    """
    answer = Answer(*_decode(text, (str, int, int, dict)))
    if not all(peer.isdecimal() and type(incarnation) is int for peer, incarnation in answer.live.items()):
        raise ExchangeError("it said what no process of a mesh says")
    return answer


def _decode(text: bytes, types: tuple[type, ...]) -> list[Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, list) or [type(value) for value in values] != list(types):
        raise ExchangeError("it said what no process of a mesh says")
    return values


def dial_until(
    target: tuple[str, int], secret: bytes, hello: Hello, deadline: float, settled: Callable[[], bool]
) -> tuple[socket.socket, Answer] | None:
    """Call a process, again while it hangs up or tells to wait; None once ``settled`` says that it is not needed.

    Raises:
        OSError: nobody listens there, or no answer came before ``deadline`` (seconds of `time.monotonic`).
    """
    while not settled():
        found = greeting.call_until(target, secret, encode(hello), deadline, settled)
        if found is None:
            return None
        connection, text = found
        try:
            answer = decode_answer(text)
        except ExchangeError as cause:
            connection.close()
            raise ConnectionError(str(cause)) from None
        if answer.verdict == ENDED:
            connection.close()
            raise ConnectionResetError("it hung up")
        if answer.verdict != WAIT or hello.purpose == PROBE:
            return connection, answer
        connection.close()
        if time.monotonic() > deadline:
            raise TimeoutError("it told to wait for too long")
        time.sleep(_RETRY)
    return None
