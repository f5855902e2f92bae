"""Mutual authentication of two processes of a job, before they exchange anything else.

Each side proves that it knows the job's secret without sending it: it tags its text and the random bytes that the other
side has just drawn with HMAC-SHA256. A recorded handshake is therefore useless later. Data that follows on the
connection is neither encrypted nor tagged.

=========  ============================================================================================
listener   `BANNER`, its random bytes
caller     length of its claim, its random bytes, tag, the claim
listener   length of its answer, tag, the answer; or it closes the connection
=========  ============================================================================================
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import select
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

BANNER = b"AUTOSYNC"
_RANDOM, _TAG = 16, 32
_LENGTH = struct.Struct("<I")
OPENING = len(BANNER) + _RANDOM
_HEAD = _LENGTH.size + _RANDOM + _TAG
_MAX_CLAIM = 1024
_MAX_ANSWER = 1024 * 1024
"""Bytes. The limit is larger than that of a claim, because an answer grows with the number of ranks."""
MAX_PENDING = 256
"""Handshakes under way at once. One more closes the oldest connection; an honest caller then tries again."""
_ACCEPTED_AT_ONCE = 64
"""Connections accepted in a row before other events are served."""
_POLL_INTERVAL = 0.1
"""Seconds between checks whether a call was cancelled."""
_RETRY = 0.05
"""Seconds before a caller whose connection was closed tries again."""

Address = Sequence[object]
"""Host and port, or the name of a Unix socket on this machine."""


class ConnectionClosed(ConnectionError):  # noqa: N818 - an event, named as one
    """The listener closed the connection before it answered: it is busy, or it has another secret."""


class ListenerHandshake:
    """The listener's side of one handshake. It never reads past the handshake, so later data stays in the socket."""

    def __init__(self, secret: bytes) -> None:
        self._secret, self._own = secret, secrets.token_bytes(_RANDOM)
        self._received = bytearray()
        self._missing = _HEAD

    @property
    def opening(self) -> bytes:
        """The bytes that the listener sends first."""
        return BANNER + self._own

    def read(self, connection: socket.socket) -> bytes | None:
        """Read available bytes; return the claim, or None while it is incomplete.

        Raises:
            OSError: the caller closed the connection, or does not know the secret.
        """
        part = connection.recv(self._missing)
        if not part:
            raise ConnectionResetError("it closed the connection")
        self._received += part
        self._missing -= len(part)
        if self._missing:
            return None
        length = _LENGTH.unpack_from(self._received)[0]
        if length > _MAX_CLAIM:
            raise ConnectionRefusedError("it is not a process of a job")
        self._missing = _HEAD + length - len(self._received)
        if self._missing:
            return None
        claim, tag = bytes(self._received[_HEAD:]), bytes(self._received[_HEAD - _TAG : _HEAD])
        if not hmac.compare_digest(tag, _tag(self._secret, b"caller", self._own, self._other, claim)):
            raise ConnectionRefusedError("it does not know the secret")
        return claim

    @property
    def _other(self) -> bytes:
        return bytes(self._received[_LENGTH.size : _LENGTH.size + _RANDOM])

    def answer(self, text: bytes) -> bytes:
        """The bytes that answer a caller whose claim is complete."""
        return _LENGTH.pack(len(text)) + _tag(self._secret, b"listener", self._own, self._other, text) + text


class Caller(NamedTuple):
    """A process that has proved that it knows the secret, and its claim. The connection is non-blocking."""

    connection: socket.socket
    claim: bytes
    handshake: ListenerHandshake

    def answer(self, text: bytes) -> None:
        """Send an answer, which completes the handshake.

        Raises:
            OSError: the caller closed the connection.
        """
        self.connection.sendall(self.handshake.answer(text))


class _Pending(NamedTuple):
    handshake: ListenerHandshake
    deadline: float


class Acceptor:
    """Accepts connections and runs their handshakes concurrently, on a single thread.

    Args:
        listener: a listening socket, owned by the acceptor.
        selector: the selector to register with; its thread must call the ``data`` of each event that is callable.
        secret: the job's secret.
        timeout: seconds that one handshake may take.
        admit: called with each authenticated caller; it then owns the connection.
    """

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        secret: bytes,
        timeout: float,
        admit: Callable[[Caller], None],
    ) -> None:
        self._listener, self._selector, self._secret = listener, selector, secret
        self._timeout, self._admit = timeout, admit
        self._pending: dict[socket.socket, _Pending] = {}
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def tick(self, now: float) -> None:
        """Close connections whose handshake takes too long; ``now`` is a time of `time.monotonic`."""
        for connection, pending in list(self._pending.items()):
            # All handshakes have the same timeout, so the dictionary is in order of deadlines.
            if now <= pending.deadline:
                break
            self._refuse(connection)

    def close(self) -> None:
        for connection in (self._listener, *self._pending):
            connection.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except OSError as cause:
                if cause.errno in (errno.EMFILE, errno.ENFILE):
                    self._make_room(0)  # no descriptor is left: close connections that are not authenticated
                return
            self._make_room(MAX_PENDING - 1)
            self._begin(connection)

    def _begin(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        handshake = ListenerHandshake(self._secret)
        try:
            connection.sendall(handshake.opening)
        except OSError:
            connection.close()
            return
        self._pending[connection] = _Pending(handshake, time.monotonic() + self._timeout)
        self._selector.register(connection, selectors.EVENT_READ, partial(self._read, connection))

    def _read(self, connection: socket.socket) -> None:
        pending = self._pending.get(connection)
        if pending is None:
            return  # closed by an earlier event of the same select call
        try:
            claim = pending.handshake.read(connection)
        except BlockingIOError:
            return
        except OSError:
            self._refuse(connection)
            return
        if claim is not None:
            self._release(connection)
            self._admit(Caller(connection, claim, pending.handshake))

    def _make_room(self, limit: int) -> None:
        while len(self._pending) > limit:
            self._refuse(next(iter(self._pending)))

    def _refuse(self, connection: socket.socket) -> None:
        self._release(connection)
        connection.close()

    def _release(self, connection: socket.socket) -> None:
        del self._pending[connection]
        self._selector.unregister(connection)


def connect(
    target: Address,
    secret: bytes,
    claim: bytes,
    deadline: float,
    cancelled: Callable[[], bool],
    source: str | None = None,
) -> tuple[socket.socket, bytes] | None:
    """Connect to a listener and run the caller's side of the handshake; None once ``cancelled`` returns True.

    Args:
        target: address of the listener.
        secret: the job's secret.
        claim: bytes that identify this process to the listener.
        deadline: latest end of the handshake, as a time of `time.monotonic`.
        cancelled: whether the connection is no longer needed.
        source: address of this host from which to connect; None leaves it to the system.

    Returns:
        The connection, which is non-blocking, and the authenticated answer of the listener.

    Raises:
        ConnectionClosed: the listener closed the connection; another attempt may succeed.
        OSError: nothing listens there, the listener does not know the secret, or it did not answer by ``deadline``.
    """
    connection = socket.socket(_family(target), socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        if source is not None:
            connection.bind((source, 0))
        call = _Call(connection, deadline, cancelled)
        call.connect(target)
        return connection, _shake_hands(call, secret, claim)
    except _Cancelled:
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise


def _shake_hands(call: _Call, secret: bytes, claim: bytes) -> bytes:
    """The answer of the listener to a caller that has connected; see `connect`."""
    opening = call.receive(OPENING)
    if not opening.startswith(BANNER):
        raise ConnectionError("the process that listens there is not part of an AutoSync job")
    theirs, own = opening[len(BANNER) :], secrets.token_bytes(_RANDOM)
    tag = _tag(secret, b"caller", theirs, own, claim)
    call.send(_LENGTH.pack(len(claim)) + own + tag + claim)
    head = call.receive(_LENGTH.size + _TAG)
    length = _LENGTH.unpack_from(head)[0]
    if length > _MAX_ANSWER:
        raise ConnectionError("its answer is not one that a process of a job sends")
    text = call.receive(length)
    if not hmac.compare_digest(head[_LENGTH.size :], _tag(secret, b"listener", theirs, own, text)):
        raise ConnectionError("it does not know the secret of this job")
    return text


def connect_with_retries(
    target: Address,
    secret: bytes,
    claim: bytes,
    deadline: float,
    cancelled: Callable[[], bool],
    source: str | None = None,
) -> tuple[socket.socket, bytes] | None:
    """Like `connect`, but try again when the listener closes the connection: it may be busy with other callers.

    Raises:
        OSError: the errors of `connect` except `ConnectionClosed`.
    """
    while not cancelled():
        try:
            return connect(target, secret, claim, deadline, cancelled, source)
        except ConnectionClosed:
            if time.monotonic() + _RETRY > deadline:
                raise TimeoutError("it closed the connection on every attempt") from None
        time.sleep(_RETRY)
    return None


class _Cancelled(Exception):  # noqa: N818 - an event, named as one
    """The call is no longer needed."""


class _Call:
    """Socket operations of one caller, bounded by a deadline."""

    def __init__(self, connection: socket.socket, deadline: float, cancelled: Callable[[], bool]) -> None:
        self._connection, self._deadline, self._cancelled = connection, deadline, cancelled

    def connect(self, target: Address) -> None:
        fault = self._connection.connect_ex(str(target[0]) if len(target) == 1 else tuple(target))
        if fault not in (0, errno.EINPROGRESS, errno.EAGAIN):
            raise OSError(fault, os.strerror(fault))
        if fault == errno.EAGAIN:  # the accept queue of a Unix socket is full
            raise ConnectionClosed("it is busy")
        self._wait(select.POLLOUT)
        if fault := self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(fault, os.strerror(fault))

    def send(self, data: bytes) -> None:
        """Send a message that fits into an empty send buffer, so that it does not block."""
        try:
            self._connection.sendall(data)
        except ConnectionError:
            raise ConnectionClosed("it closed the connection") from None

    def receive(self, size: int) -> bytes:
        """The next ``size`` bytes."""
        data = bytearray()
        while len(data) < size:
            self._wait(select.POLLIN)
            try:
                part = self._connection.recv(size - len(data))
            except BlockingIOError:
                continue
            except ConnectionError:
                part = b""
            if not part:
                raise ConnectionClosed("it closed the connection")
            data += part
            # Checked here too, because a listener that sends byte by byte never makes `_wait` wait.
            if time.monotonic() > self._deadline:
                raise TimeoutError("no answer")
        return bytes(data)

    def _wait(self, event: int) -> None:
        """Wait until ``event`` is possible on the connection."""
        waiting = select.poll()
        waiting.register(self._connection, event)
        while not waiting.poll(_POLL_INTERVAL * 1000):
            if self._cancelled():
                raise _Cancelled
            if time.monotonic() > self._deadline:
                raise TimeoutError("no answer")


def _family(target: Address) -> socket.AddressFamily:
    if len(target) == 1:
        return socket.AF_UNIX
    return socket.AF_INET6 if ":" in str(target[0]) else socket.AF_INET


def _tag(secret: bytes, role: bytes, listener: bytes, caller: bytes, text: bytes) -> bytes:
    # The role is part of the tagged bytes, so that nobody can send a tag back to the process that made it.
    return hmac.digest(secret, role + b"\0" + listener + caller + text, "sha256")
