"""The door of a mesh: who connects must greet with the job's secret, soon."""

from __future__ import annotations

import secrets
import selectors
import socket
import time
from collections.abc import Callable
from functools import partial

from lightning_autosync.errors import ExchangeError
from lightning_autosync.runtime.relaxed import handshake
from lightning_autosync.runtime.relaxed.handshake import Hello


class Reception:
    """Accepts connections and hears them out. Used by the mesh's thread only.

    Args:
        listener: a listening socket; the reception owns it.
        patience: seconds that a greeting may take.
        answer: given a caller that knows the secret, and what it says; the connection is watched no more.
    """

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        secret: str,
        patience: float,
        answer: Callable[[socket.socket, Hello], None],
    ) -> None:
        self.address = listener.getsockname()[:2]
        self._listener, self._selector, self._secret = listener, selector, secret
        self._patience, self._answer = patience, answer
        self._guests: dict[socket.socket, tuple[bytearray, float]] = {}
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def tick(self, now: float) -> None:
        """Turn away who takes too long."""
        for guest, (_, deadline) in list(self._guests.items()):
            if now > deadline:
                self._turn_away(guest)

    def close(self) -> None:
        for connection in (self._listener, *self._guests):
            connection.close()

    def _accept(self) -> None:
        try:
            guest, _ = self._listener.accept()
        except OSError:
            return
        guest.setblocking(False)
        self._guests[guest] = bytearray(), time.monotonic() + self._patience
        self._selector.register(guest, selectors.EVENT_READ, partial(self._greet, guest))

    def _greet(self, guest: socket.socket) -> None:
        if guest not in self._guests:
            return
        said, _ = self._guests[guest]
        try:
            part = guest.recv(2048)
            said += part
            hello = handshake.decode_hello(said)
        except BlockingIOError:
            return
        except (OSError, ExchangeError):
            self._turn_away(guest)
            return
        if not part or (hello is not None and not secrets.compare_digest(hello.secret.encode(), self._secret.encode())):
            self._turn_away(guest)
        elif hello is not None:
            self._release(guest)
            self._answer(guest, hello)

    def _turn_away(self, guest: socket.socket) -> None:
        self._release(guest)
        guest.close()

    def _release(self, guest: socket.socket) -> None:
        del self._guests[guest]
        self._selector.unregister(guest)
