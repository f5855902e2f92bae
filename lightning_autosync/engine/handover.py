"""How ranks of one machine tell each other that a part of their shared memory is ready.

A few bytes over a Unix socket: the system call orders the memory accesses before and after it on every processor, a
waiting rank gives its core to those that still compute, and a rank that dies is noticed at once.
"""

from __future__ import annotations

import atexit
import os
import selectors
import socket
import struct
import time
from collections.abc import Mapping
from typing import NoReturn

from lightning_autosync.engine.waiting import explained, wait_for_ranks
from lightning_autosync.errors import ExchangeError

_RECORD = struct.Struct("=II")
_LEAVE = 2**32 - 1
"""Instead of a mark's number: the rank takes part in no further step."""
_READ = 4096
"""Bytes read at once; more stay with the kernel."""


class _Peer:
    """One connection, and how far its rank is."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.socket = connection
        self.steps: dict[int, int] = {}
        self.unread = bytearray()
        self.unsent = bytearray()
        self.gone = ""

    def read(self) -> None:
        """Take in what came; a peer that is lost is marked as gone, after all that it said before."""
        try:
            data = self.socket.recv(_READ)
        except BlockingIOError:
            return
        except OSError as cause:
            self.gone = self.gone or str(cause)
            return
        if not data:
            self.gone = self.gone or "it was closed"
        self.unread += data
        whole = len(self.unread) // _RECORD.size * _RECORD.size
        for mark, step in _RECORD.iter_unpack(self.unread[:whole]):
            if mark == _LEAVE:
                self.gone = "left"
            else:
                self.steps[mark] = step
        del self.unread[:whole]

    def send(self) -> None:
        """Hand to the kernel what it takes."""
        try:
            del self.unsent[: self.socket.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            # Reading tells why, after what the peer said before it went.
            self.unsent.clear()


class Handover:
    """Marks that each rank sets, step by step, and that the others wait for. For one thread.

    Args:
        sockets: connected stream sockets by peer rank, one to every other rank; owned from now on.
    """

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._error: ExchangeError | None = None
        self._process = os.getpid()
        self._selector = selectors.DefaultSelector()
        self._peers = [_Peer(rank, connection) for rank, connection in sorted(sockets.items())]
        for peer in self._peers:
            peer.socket.setblocking(False)
            self._selector.register(peer.socket, selectors.EVENT_READ, peer)
        # A script may end without closing what it opened; peers then read that this rank left, not that it died.
        atexit.register(self.close)

    def announce(self, mark: int, step: int) -> None:
        """Tell all peers that this rank has reached ``mark`` in ``step``; what it wrote before is theirs to read."""
        record = _RECORD.pack(mark, step)
        for peer in self._peers:
            peer.unsent += record
            peer.send()

    def wait(self, mark: int, step: int, what: str, timeout: float) -> None:
        """Wait until every peer has announced ``mark`` in ``step``.

        Raises:
            ExchangeError: a peer was lost, has left, or did not answer in ``timeout`` seconds.
        """
        if self._error is not None:
            raise self._error
        try:
            wait_for_ranks(lambda seconds: self._reached(mark, step, seconds), what, timeout)
        except ExchangeError as error:
            self._fail(error)

    def close(self) -> None:
        """Take leave of the peers and close the connections."""
        atexit.unregister(self.close)
        # A forked child has the same sockets, and must not speak for its parent.
        speaks = self._error is None and os.getpid() == self._process
        for peer in self._peers:
            if speaks:
                peer.unsent += _RECORD.pack(_LEAVE, 0)
                peer.send()
            peer.socket.close()
        self._peers = []
        self._selector.close()

    def _reached(self, mark: int, step: int, seconds: float) -> bool:
        """Whether every peer has announced ``mark`` in ``step``, after ``seconds`` at most."""
        deadline: float | None = None
        while missing := [peer for peer in self._peers if peer.steps.get(mark, 0) < step or peer.unsent]:
            now = time.monotonic()
            deadline = now + seconds if deadline is None else deadline
            self._check(missing, mark, step)
            if now >= deadline:
                return False
            self._serve(deadline - now)
        return True

    def _serve(self, timeout: float) -> None:
        for peer in self._peers:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
            if not peer.gone and self._selector.get_key(peer.socket).events != events:
                self._selector.modify(peer.socket, events, peer)
        for key, events in self._selector.select(timeout):
            peer = key.data
            if events & selectors.EVENT_WRITE:
                peer.send()
            if events & selectors.EVENT_READ:
                peer.read()
            if peer.gone:
                self._selector.unregister(peer.socket)

    def _check(self, missing: list[_Peer], mark: int, step: int) -> None:
        for peer in missing:
            if peer.gone == "left":
                raise explained(f"rank {peer.rank} has ended after step {peer.steps.get(mark, 0)}; this is step {step}")
            if peer.gone:
                raise explained(f"lost the connection to rank {peer.rank}: {peer.gone}")

    def _fail(self, error: ExchangeError) -> NoReturn:
        """Give up for good; the other ranks learn it from lost connections."""
        self._error = error
        for peer in self._peers:
            peer.socket.close()
        raise error
