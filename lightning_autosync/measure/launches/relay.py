"""A process whose standard streams are those of a worker on another host, over two TCP connections.

`lightning_autosync.measure.launches.ray_cluster` starts it as a script, so that it needs no import of this package.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from contextlib import suppress

KEY = "AUTOSYNC_RELAY_KEY"
"""Environment variable with the text that each connection sends first, followed by one of the roles."""
TALK, ERRORS = b"t", b"e"
"""Roles of the connections: the worker's stdin and stdout, and its stderr."""
_CHUNK = 64 * 1024
_OPENING = 30.0
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Options by which a host that vanished counts as lost after 50 s of silence."""


def main() -> None:
    """Copy until the worker ends. At the end of its own stdin it closes the worker's, which ends the worker."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # asks for a worker's stacks, which this process cannot pass on
    address, key = (sys.argv[1], int(sys.argv[2])), os.environ[KEY].encode()
    with _connection(address, key + TALK) as talk, _connection(address, key + ERRORS) as errors:
        copies = [threading.Thread(target=_copy_orders, args=(talk,), daemon=True)]
        copies.append(threading.Thread(target=_copy, args=(errors, 2), daemon=True))
        for copy in copies:
            copy.start()
        _copy(talk, 1)
        copies[1].join(1.0)


def _connection(address: tuple[str, int], greeting: bytes) -> socket.socket:
    opened = socket.create_connection(address, _OPENING)
    opened.settimeout(None)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    opened.sendall(greeting)
    return opened


def _copy_orders(talk: socket.socket) -> None:
    with suppress(OSError):  # the worker has ended, and `main` sees it
        while chunk := os.read(0, _CHUNK):
            talk.sendall(chunk)
        talk.shutdown(socket.SHUT_WR)


def _copy(source: socket.socket, target: int) -> None:
    with suppress(ConnectionError):  # the worker was killed
        while chunk := source.recv(_CHUNK):
            rest = memoryview(chunk)
            while rest:
                rest = rest[os.write(target, rest) :]


if __name__ == "__main__":
    main()
