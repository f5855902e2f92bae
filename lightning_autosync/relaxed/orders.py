"""Calls that other threads leave for the one that serves a mesh's connections, and that wake it."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable

from lightning_autosync.errors import ExchangeError


class Orders:
    """A queue of calls with a socket that becomes readable when there are any.

    Attributes:
        woken: to be watched by the thread that calls `obey`.
    """

    def __init__(self) -> None:
        self._orders: deque[Callable[[], None]] = deque()
        self._awake = self._closed = False
        self._submitting = threading.Lock()
        self._wake, self.woken = socket.socketpair()
        self.woken.setblocking(False)

    def submit(self, order: Callable[[], None]) -> None:
        """Leave a call; from any thread.

        Raises:
            ExchangeError: the queue is closed.
        """
        with self._submitting:
            if self._closed:
                raise ExchangeError("the mesh is closed")
            self._orders.append(order)
            self._rouse()

    def obey(self) -> None:
        """Make all calls that were left; where one raises, the thread wakes again for those behind it."""
        try:
            while self.woken.recv(4096):
                pass
        except BlockingIOError:
            pass
        # In this order: who submits from now on wakes the thread again.
        self._awake = False
        try:
            while self._orders:
                self._orders.popleft()()
        finally:
            if self._orders:  # for which somebody may wait
                self._rouse()

    def _rouse(self) -> None:
        if not self._awake:
            self._awake = True
            self._wake.send(b"\0")

    def close(self) -> list[Callable[[], None]]:
        """Take no more calls.

        Returns:
            Those that were left and not made.
        """
        with self._submitting:
            self._closed = True
            self._wake.close()
            self.woken.close()
            left = list(self._orders)
            self._orders.clear()
        return left
