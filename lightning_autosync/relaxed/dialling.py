"""Calls to peers, each on a thread of its own, for they may take seconds."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from lightning_autosync.relaxed.handshake import Answer, Hello, dial_until

Reached = Callable[[tuple[socket.socket, Answer] | None], None]
"""Told the connection and the answer; None if the call is no longer needed."""
Missed = Callable[[OSError], None]


class Dialler:
    """Makes calls, with the job's secret, until closed."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._threads: list[threading.Thread] = []
        self._changing = threading.Lock()  # the mesh's thread calls, and whoever makes the mesh
        self._closed = threading.Event()

    def call(
        self,
        address: tuple[str, int],
        hello: Hello,
        timeout: float,
        settled: Callable[[], bool],
        reached: Reached,
        missed: Missed,
    ) -> None:
        """Call for at most ``timeout`` seconds, or until ``settled``; tell how it went, on the call's own thread."""
        deadline = time.monotonic() + timeout

        def run() -> None:
            try:
                found = dial_until(address, self._secret, hello, deadline, lambda: settled() or self._closed.is_set())
            except OSError as cause:
                missed(cause)
            else:
                reached(found)

        thread = threading.Thread(target=run, name="autosync-dial", daemon=True)
        with self._changing:
            thread.start()
            self._threads = [*(one for one in self._threads if one.is_alive()), thread]

    def hang_up(self) -> None:
        """Let calls end soon; who waits in one is told that it is no longer needed."""
        self._closed.set()

    def join(self) -> None:
        """Wait until the last call has ended."""
        with self._changing:
            threads = self._threads
        for thread in threads:
            thread.join()
