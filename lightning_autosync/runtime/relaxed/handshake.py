"""How two processes of a mesh meet: one dials and says who it is, the other answers whether it may stay.

The network itself is trusted; the secret keeps strangers and stray processes of other jobs away.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

from lightning_autosync.errors import ExchangeError

_LENGTH = struct.Struct("<H")
_LONGEST = 1024
"""Bytes of JSON that a hello may have; answers come from those who are called, and grow with the ranks."""

_RETRY = 0.05
"""Seconds after which whoever was told to wait asks again."""

_LOOK = 0.1
"""Seconds between looks whether a call is still needed."""

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
    """What it is told, by which incarnation, which has so many of its frames and counts these peers (by rank, their
    incarnations) as live."""

    verdict: str
    incarnation: int
    received: int
    live: dict[str, int]


def encode(greeting: Hello | Answer) -> bytes:
    """A greeting as it travels."""
    text = json.dumps(list(greeting)).encode()
    return _LENGTH.pack(len(text)) + text


def decode_hello(data: bytes | bytearray) -> Hello | None:
    """The hello at the start of ``data``; None while it is incomplete.

    Raises:
        ExchangeError: whoever sent it is not of the mesh.
    """
    if len(data) >= _LENGTH.size and _LENGTH.unpack_from(data)[0] > _LONGEST:
        raise ExchangeError("a stranger's greeting")
    text = _text(data)
    if text is None:
        return None
    try:
        hello = Hello(*json.loads(text))
        hello.secret.encode()  # half of a surrogate pair is text in JSON, and cannot be compared
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise ExchangeError("a stranger's greeting") from None
    types = (str, str, int, int, int, int, str, int)
    if not all(type(value) is kind for value, kind in zip(hello, types, strict=True)):
        raise ExchangeError("a stranger's greeting")
    return hello


def _text(data: bytes | bytearray) -> bytes | None:
    if len(data) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(data)
    text = bytes(data[_LENGTH.size : _LENGTH.size + length])
    return text if len(text) == length else None


def dial(
    target: tuple[str, int], hello: Hello, deadline: float, settled: Callable[[], bool]
) -> tuple[socket.socket, Answer] | None:
    """Call a process and hear its answer; None once ``settled`` says that it is no longer needed.

    Raises:
        OSError: nobody listens there, or no answer came before ``deadline`` (seconds of `time.monotonic`).
    """
    family = socket.AF_INET6 if ":" in target[0] else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        fault = connection.connect_ex(target)
        if fault not in (0, errno.EINPROGRESS):
            raise OSError(fault, os.strerror(fault))
        if not _ready(connection, select.POLLOUT, deadline, settled):
            connection.close()
            return None
        if fault := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(fault, os.strerror(fault))
        connection.sendall(encode(hello))
        data = b""
        while (text := _text(data)) is None:
            if not _ready(connection, select.POLLIN, deadline, settled):
                connection.close()
                return None
            part = connection.recv(_LENGTH.size - len(data) if len(data) < _LENGTH.size else _rest(data))
            if not part:
                raise ConnectionResetError("it hung up")
            data += part
        return connection, Answer(*json.loads(text))
    except (OSError, ExchangeError, ValueError, TypeError) as cause:
        connection.close()
        raise cause if isinstance(cause, OSError) else ConnectionError("it answered nonsense") from None


def _ready(connection: socket.socket, event: int, deadline: float, settled: Callable[[], bool]) -> bool:
    """Wait until a connection can be used; False once it is no longer needed."""
    waiting = select.poll()
    waiting.register(connection, event)
    while not waiting.poll(_LOOK * 1000):
        if settled():
            return False
        if time.monotonic() > deadline:
            raise TimeoutError("no answer")
    return True


def _rest(data: bytes) -> int:
    """Bytes of the greeting that are still to come; what follows it belongs to the link."""
    return int(_LENGTH.unpack_from(data)[0]) + _LENGTH.size - len(data)


def dial_until(
    target: tuple[str, int], hello: Hello, deadline: float, settled: Callable[[], bool]
) -> tuple[socket.socket, Answer] | None:
    """Call again while told to wait; None once ``settled`` says that it is no longer needed.

    Raises:
        OSError: as `dial`.
    """
    while not settled():
        found = dial(target, hello, deadline, settled)
        if found is None:
            return None
        connection, answer = found
        if answer.verdict != WAIT or hello.purpose == PROBE:
            return connection, answer
        connection.close()
        if time.monotonic() > deadline:
            raise TimeoutError("it told to wait for too long")
        time.sleep(_RETRY)
    return None
