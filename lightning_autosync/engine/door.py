"""Where processes of a job come in: who connects must greet with the job's secret, soon."""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from lightning_autosync.engine.greeting import Reader

MOST_GUESTS = 256
"""Connections that have not greeted yet; one more, and the oldest goes. An honest caller then calls again."""

_AT_ONCE = 64
"""Connections to accept before anything else gets its turn."""


class Visitor(NamedTuple):
    """Who knows the secret, and what it claims; the connection is non-blocking."""

    connection: socket.socket
    claim: bytes
    reader: Reader

    def answer(self, text: bytes) -> None:
        """Say something back, which completes the greeting.

        Raises:
            OSError: it has hung up.
        """
        self.connection.sendall(self.reader.answer(text))


class _Guest(NamedTuple):
    reader: Reader
    deadline: float


class Door:
    """Accepts connections and hears them out, all at the same time. Used by one thread only.

    Args:
        listener: a listening socket; the door owns it.
        selector: whose events' ``data`` are called, if they are callable, by the thread that waits for them.
        patience: seconds that a greeting may take.
        admit: given each visitor, whose connection is watched no more and its own.
    """

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        secret: bytes,
        patience: float,
        admit: Callable[[Visitor], None],
    ) -> None:
        self._listener, self._selector, self._secret = listener, selector, secret
        self._patience, self._admit = patience, admit
        self._guests: dict[socket.socket, _Guest] = {}
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def tick(self, now: float) -> None:
        """Turn away who takes too long, at ``now`` (seconds of `time.monotonic`)."""
        for connection, guest in list(self._guests.items()):
            if now <= guest.deadline:
                break
            self._turn_away(connection)

    def close(self) -> None:
        for connection in (self._listener, *self._guests):
            connection.close()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except OSError as cause:
                if cause.errno in (errno.EMFILE, errno.ENFILE):
                    self._make_room(0)  # no descriptors are left; strangers give theirs back
                return
            self._make_room(MOST_GUESTS - 1)
            self._welcome(connection)

    def _welcome(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        reader = Reader(self._secret)
        try:
            connection.sendall(reader.opening)
        except OSError:
            connection.close()
            return
        self._guests[connection] = _Guest(reader, time.monotonic() + self._patience)
        self._selector.register(connection, selectors.EVENT_READ, partial(self._hear, connection))

    def _hear(self, connection: socket.socket) -> None:
        guest = self._guests.get(connection)
        if guest is None:
            return  # turned away in the same turn
        try:
            claim = guest.reader.read(connection)
        except BlockingIOError:
            return
        except OSError:
            self._turn_away(connection)
            return
        if claim is not None:
            self._release(connection)
            self._admit(Visitor(connection, claim, guest.reader))

    def _make_room(self, most: int) -> None:
        while len(self._guests) > most:
            self._turn_away(next(iter(self._guests)))

    def _turn_away(self, connection: socket.socket) -> None:
        self._release(connection)
        connection.close()

    def _release(self, connection: socket.socket) -> None:
        del self._guests[connection]
        self._selector.unregister(connection)
