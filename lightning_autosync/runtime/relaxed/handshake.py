"""How two processes of a mesh meet: one dials and says who it is, the other answers whether it may stay.

The network itself is trusted; the secret keeps strangers and stray processes of other jobs away.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

from lightning_autosync.errors import ExchangeError

_LENGTH = struct.Struct("<H")
_LONGEST = 1024
"""Bytes of JSON that a greeting may have."""

_RETRY = 0.05
"""Seconds after which whoever was told to wait asks again."""

JOIN, RESUME, PROBE = "join", "resume", "probe"
"""What a caller wants: a first connection, a new one in place of one that dropped, or only to know how it stands."""

WELCOME, WAIT, STALE, EXPELLED = "welcome", "wait", "stale", "expelled"
"""Answers: connected; the other side will see to it; the caller knew an earlier incarnation; given up."""


class Hello(NamedTuple):
    """What a caller says: who it is, under which incarnation, whom it expects (0: anyone), how many frames it has."""

    secret: str
    purpose: str
    rank: int
    incarnation: int
    target: int
    received: int
    host: str
    port: int


class Answer(NamedTuple):
    """What it is told, by which incarnation, which has so many of its frames."""

    verdict: str
    incarnation: int
    received: int


def encode(greeting: Hello | Answer) -> bytes:
    """A greeting as it travels."""
    text = json.dumps(list(greeting)).encode()
    return _LENGTH.pack(len(text)) + text


def decode_hello(data: bytes | bytearray) -> Hello | None:
    """The hello at the start of ``data``; None while it is incomplete.

    Raises:
        ExchangeError: whoever sent it is not of the mesh.
    """
    text = _text(data)
    if text is None:
        return None
    try:
        hello = Hello(*json.loads(text))
    except (ValueError, TypeError):
        raise ExchangeError("a stranger's greeting") from None
    types = (str, str, int, int, int, int, str, int)
    if not all(type(value) is kind for value, kind in zip(hello, types, strict=True)):
        raise ExchangeError("a stranger's greeting")
    return hello


def _text(data: bytes | bytearray) -> bytes | None:
    if len(data) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(data)
    if length > _LONGEST:
        raise ExchangeError("a stranger's greeting")
    text = bytes(data[_LENGTH.size : _LENGTH.size + length])
    return text if len(text) == length else None


def dial(target: tuple[str, int], hello: Hello, timeout: float) -> tuple[socket.socket, Answer]:
    """Call a process and hear its answer.

    Raises:
        OSError: nobody listens there, or no answer came in ``timeout`` seconds.
    """
    connection = socket.create_connection(target, timeout=timeout)
    try:
        connection.sendall(encode(hello))
        data = b""
        while (text := _text(data)) is None:
            part = connection.recv(_LENGTH.size - len(data) if len(data) < _LENGTH.size else _rest(data))
            if not part:
                raise ConnectionResetError("it hung up")
            data += part
        return connection, Answer(*json.loads(text))
    except (OSError, ExchangeError, ValueError, TypeError) as cause:
        connection.close()
        raise cause if isinstance(cause, OSError) else ConnectionError("it answered nonsense") from None


def _rest(data: bytes) -> int:
    """Bytes of the greeting that are still to come; what follows it belongs to the link."""
    return int(_LENGTH.unpack_from(data)[0]) + _LENGTH.size - len(data)


def dial_until(
    target: tuple[str, int], hello: Hello, deadline: float, settled: Callable[[], bool]
) -> tuple[socket.socket, Answer] | None:
    """Call again while told to wait; None once ``settled`` says that it is no longer needed.

    Raises:
        OSError: as `dial`; ``deadline`` is in seconds of `time.monotonic`.
    """
    while not settled():
        connection, answer = dial(target, hello, max(0.05, deadline - time.monotonic()))
        if answer.verdict != WAIT or hello.purpose == PROBE:
            return connection, answer
        connection.close()
        if time.monotonic() > deadline:
            raise TimeoutError("it told to wait for too long")
        time.sleep(_RETRY)
    return None
