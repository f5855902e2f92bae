"""A process whose standard streams are those of a worker on another host, over TCP connections.

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
TALK, ERRORS, STATUS = b"t", b"e", b"s"
"""Roles of the connections: the worker's stdin and stdout, its stderr, and at its end the exit status as text."""
_CHUNK = 64 * 1024
_OPENING = 30.0
_ENDING = 10.0
"""Seconds in which the exit status must follow the end of the worker's stdout."""
_LOST = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 50_000}
"""Options by which a host that vanished counts as lost after 50 s, whether or not data is on its way to it."""


def notice_loss(connection: socket.socket) -> None:
    """Let the connection fail 50 s after the other host vanished."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _LOST.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def main(host: str, port: int) -> str | int | None:
    """Copy until the worker ends. At the end of its own stdin it closes the worker's, which ends the worker.

    Returns:
        The exit status, or the message of a failure. A process whose worker was killed kills itself by the same signal.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # asks for a worker's stacks, which this process cannot pass on
    key = os.environ[KEY].encode()
    try:
        talk, errors, status = (_connection((host, port), key + role) for role in (TALK, ERRORS, STATUS))
    except OSError as error:
        return (
            f"launch=ray: no connection from this machine to the worker at {host}:{port}: {error}; allowed: a firewall "
            "that lets this port through (launch.port_range=[FIRST,LAST] restricts ports)"
        )
    copies = [threading.Thread(target=_copy_orders, args=(talk,), daemon=True)]
    copies.append(threading.Thread(target=_copy, args=(errors, 2), daemon=True))
    for copy in copies:
        copy.start()
    _copy(talk, 1)
    copies[1].join(1.0)
    return _outcome(status, f"{host}:{port}")


def _connection(address: tuple[str, int], greeting: bytes) -> socket.socket:
    opened = socket.create_connection(address, _OPENING)
    opened.settimeout(None)
    notice_loss(opened)
    opened.sendall(greeting)
    return opened


def _copy_orders(talk: socket.socket) -> None:
    with suppress(OSError):  # the worker has ended, and `main` sees it
        while chunk := os.read(0, _CHUNK):
            talk.sendall(chunk)
        talk.shutdown(socket.SHUT_WR)


def _copy(source: socket.socket, target: int) -> None:
    with suppress(OSError):  # the worker was killed, or its host vanished; `_outcome` says so
        while chunk := source.recv(_CHUNK):
            rest = memoryview(chunk)
            while rest:
                rest = rest[os.write(target, rest) :]


def _outcome(status: socket.socket, address: str) -> str | int | None:
    """What `main` returns for an exit status, or for the text of an error that kept the worker from starting."""
    status.settimeout(_ENDING)
    text = ""
    with suppress(OSError), status.makefile("rb") as lines:
        text = lines.read(_CHUNK).decode(errors="replace")
    if not text:
        return f"launch=ray: lost the connection to the worker at {address}: its host or Ray's actor ended or vanished"
    try:
        code = int(text)
    except ValueError:
        return f"launch=ray: the worker at {address} was not started: {text}"
    if code < 0:
        import resource  # not on every system that imports this module

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
