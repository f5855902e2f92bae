"""How two processes of a job make sure of each other before anything else is said.

Each proves that it knows the job's secret, which does not travel: it tags what it says, and random bytes that the other
has just drawn, with HMAC-SHA256. So a greeting that was overheard is of no use later. What follows on the connection is
neither encrypted nor tagged.

=========  ============================================================================================
listener   `BANNER`, its random bytes
caller     length of its claim, its random bytes, tag, the claim
listener   length of its answer, tag, the answer; or it hangs up
=========  ============================================================================================
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence

BANNER = b"AUTOSYNC"
_RANDOM, _TAG = 16, 32
_LENGTH = struct.Struct("<I")
OPENING = len(BANNER) + _RANDOM
_HEAD = _LENGTH.size + _RANDOM + _TAG
LONGEST_CLAIM = 1024
_LONGEST_ANSWER = 1024 * 1024
"""Bytes; an answer, which comes from who was called, grows with the ranks."""

_LOOK = 0.1
"""Seconds between looks whether a call is still needed."""

_RETRY = 0.05
"""Seconds after which whoever was hung up on calls again."""

Address = Sequence[object]
"""Host and port, or the name of a socket of this machine."""


class HungUp(ConnectionError):  # noqa: N818 - an event, named as one
    """Who was called closed the connection before it answered: it is busy with others, or has another secret."""


class Reader:
    """A listener's view of a greeting: it asks for so many bytes, no more, and never for more than a greeting has."""

    def __init__(self, secret: bytes) -> None:
        self._secret, self._own = secret, secrets.token_bytes(_RANDOM)
        self._said = bytearray()
        self._missing = _HEAD

    @property
    def opening(self) -> bytes:
        """What the listener says first."""
        return BANNER + self._own

    def read(self, connection: socket.socket) -> bytes | None:
        """Take in what has come; the claim, or None while it is incomplete.

        Raises:
            OSError: the caller has hung up, or does not know the secret.
        """
        part = connection.recv(self._missing)
        if not part:
            raise ConnectionResetError("it hung up")
        self._said += part
        self._missing -= len(part)
        if self._missing:
            return None
        length = _LENGTH.unpack_from(self._said)[0]
        if length > LONGEST_CLAIM:
            raise ConnectionRefusedError("a stranger's greeting")
        self._missing = _HEAD + length - len(self._said)
        if self._missing:
            return None
        claim, tag = bytes(self._said[_HEAD:]), bytes(self._said[_HEAD - _TAG : _HEAD])
        if not hmac.compare_digest(tag, _tag(self._secret, b"caller", self._own, self._other, claim)):
            raise ConnectionRefusedError("it does not know the secret")
        return claim

    @property
    def _other(self) -> bytes:
        return bytes(self._said[_LENGTH.size : _LENGTH.size + _RANDOM])

    def answer(self, text: bytes) -> bytes:
        """What to send to a caller whose claim was read."""
        return _LENGTH.pack(len(text)) + _tag(self._secret, b"listener", self._own, self._other, text) + text


def call(
    target: Address, secret: bytes, claim: bytes, deadline: float, settled: Callable[[], bool]
) -> tuple[socket.socket, bytes] | None:
    """Connect, greet, and hear the answer; None once ``settled`` says that the call is no longer needed.

    Args:
        deadline: of the whole greeting, in seconds of `time.monotonic`.

    Returns:
        The connection, which is non-blocking, and the answer, which is the word of who knows the secret.

    Raises:
        HungUp: it hung up on the greeting; another call may do.
        OSError: nobody listens there, or none that knows the secret; or no answer came before ``deadline``.
    """
    connection = socket.socket(_family(target), socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        wait = _Patience(connection, deadline, settled)
        _connect(connection, target, wait)
        opening = wait.receive(OPENING)
        if not opening.startswith(BANNER):
            raise ConnectionError("what listens there is no process of a job")
        theirs, own = opening[len(BANNER) :], secrets.token_bytes(_RANDOM)
        tag = _tag(secret, b"caller", theirs, own, claim)
        wait.say(_LENGTH.pack(len(claim)) + own + tag + claim)
        head = wait.receive(_LENGTH.size + _TAG)
        length = _LENGTH.unpack_from(head)[0]
        if length > _LONGEST_ANSWER:
            raise ConnectionError("it answered nonsense")
        text = wait.receive(length)
        if not hmac.compare_digest(head[_LENGTH.size :], _tag(secret, b"listener", theirs, own, text)):
            raise ConnectionError("it does not know the secret of this job")
        return connection, text
    except _Settled:
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise


def call_until(
    target: Address, secret: bytes, claim: bytes, deadline: float, settled: Callable[[], bool]
) -> tuple[socket.socket, bytes] | None:
    """As `call`, again while it is hung up on: who listens may be busy with strangers.

    Raises:
        OSError: as there, but for `HungUp`.
    """
    while not settled():
        try:
            return call(target, secret, claim, deadline, settled)
        except HungUp:
            if time.monotonic() + _RETRY > deadline:
                raise TimeoutError("it hung up on each call") from None
        time.sleep(_RETRY)
    return None


class _Settled(Exception):  # noqa: N818 - an event, named as one
    """The call is no longer needed."""


class _Patience:
    """Waits of one call."""

    def __init__(self, connection: socket.socket, deadline: float, settled: Callable[[], bool]) -> None:
        self._connection, self._deadline, self._settled = connection, deadline, settled

    def ready(self, event: int) -> None:
        """Wait until the connection can be used."""
        waiting = select.poll()
        waiting.register(self._connection, event)
        while not waiting.poll(_LOOK * 1000):
            if self._settled():
                raise _Settled
            if time.monotonic() > self._deadline:
                raise TimeoutError("no answer")

    def say(self, data: bytes) -> None:
        """Send what fits into an empty queue."""
        try:
            self._connection.sendall(data)
        except ConnectionError:
            raise HungUp("it hung up") from None

    def receive(self, size: int) -> bytes:
        """The next ``size`` bytes."""
        data = bytearray()
        while len(data) < size:
            self.ready(select.POLLIN)
            try:
                part = self._connection.recv(size - len(data))
            except BlockingIOError:
                continue
            except ConnectionError:
                part = b""
            if not part:
                raise HungUp("it hung up")
            data += part
            if time.monotonic() > self._deadline:
                raise TimeoutError("no answer")
        return bytes(data)


def _connect(connection: socket.socket, target: Address, wait: _Patience) -> None:
    fault = connection.connect_ex(str(target[0]) if len(target) == 1 else tuple(target))
    if fault not in (0, errno.EINPROGRESS, errno.EAGAIN):
        raise OSError(fault, os.strerror(fault))
    if fault == errno.EAGAIN:  # of a socket of this machine whose queue is full
        raise HungUp("it is busy")
    wait.ready(select.POLLOUT)
    if fault := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(fault, os.strerror(fault))


def _family(target: Address) -> socket.AddressFamily:
    if len(target) == 1:
        return socket.AF_UNIX
    return socket.AF_INET6 if ":" in str(target[0]) else socket.AF_INET


def _tag(secret: bytes, role: bytes, listener: bytes, caller: bytes, text: bytes) -> bytes:
    return hmac.digest(secret, role + b"\0" + listener + caller + text, "sha256")
