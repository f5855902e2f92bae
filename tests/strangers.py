"""Connections of those who do not belong to a job, and the sockets at which it listens."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

SECRET = b"known to all processes of a test"

_RESET = struct.pack("ii", 1, 0)
_TLS_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(range(32)) + b"\x20" + bytes(168)
_BANNER, _RANDOM = b"AUTOSYNC", 16

Address = tuple[str, int]


def claim(opening: bytes, secret: bytes, text: bytes, length: int | None = None) -> bytes:
    """What a caller says to a listener that said ``opening``, of whatever secret and length it pretends to."""
    import hmac

    theirs, own = opening[len(_BANNER) :], random.randbytes(_RANDOM)
    tag = hmac.digest(secret, b"caller\0" + theirs + own + text, "sha256")
    return struct.pack("<I", len(text) if length is None else length) + own + tag + text


def _silent(connection: socket.socket) -> None:
    time.sleep(0.3)


def _slow(connection: socket.socket) -> None:
    for byte in random.randbytes(6):
        connection.send(bytes([byte]))
        time.sleep(0.05)


def _http(connection: socket.socket) -> None:
    connection.sendall(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n" * 4)


def _tls(connection: socket.socket) -> None:
    connection.sendall(_TLS_HELLO)


def _noise(connection: socket.socket) -> None:
    connection.sendall(random.randbytes(random.randrange(1, 4000)))


def _other_secret(connection: socket.socket) -> None:
    text = b'["join", 1, 2, 0, 0, "127.0.0.1", 1]'
    connection.sendall(claim(connection.recv(24), b"another secret than the job has", text))


_overheard: list[bytes] = []


def _replayed(connection: socket.socket) -> None:
    opening = connection.recv(24)
    _overheard.append(claim(opening, SECRET, b"0"))
    connection.sendall(_overheard[0] if len(_overheard) > 1 else b"")


def _huge(connection: socket.socket) -> None:
    connection.sendall(claim(connection.recv(24), SECRET, b"0", length=2**32 - 1) + b"x" * 100)


def _earlier(connection: socket.socket) -> None:
    """What this listener would have taken, when no secret was needed or it travelled."""
    text = b'["", "join", 1, 2, 0, 0, "127.0.0.1", 1]'
    connection.sendall(struct.pack("<H", len(text)) + text)


def _reset(connection: socket.socket) -> None:
    connection.send(b"\0")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


KINDS: dict[str, Callable[[socket.socket], None]] = {
    "silent": _silent,
    "slow": _slow,
    "HTTP": _http,
    "TLS": _tls,
    "noise": _noise,
    "another secret": _other_secret,
    "replayed": _replayed,
    "huge": _huge,
    "earlier": _earlier,
    "reset": _reset,
}


def visit(address: Address, kind: str) -> bool:
    """Connect to ``address`` and behave as ``kind`` says; whether anybody was there to connect to."""
    try:
        with socket.create_connection(address, timeout=2.0) as connection:
            with suppress(OSError):  # it was turned away meanwhile
                KINDS[kind](connection)
            return True
    except OSError:
        return False


@contextmanager
def listening_as(behave: Callable[[socket.socket], object]) -> Iterator[Address]:
    """Something else that listens."""
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as held:

        def serve() -> None:
            while True:
                try:
                    connection = held.enter_context(server.accept()[0])
                    behave(connection)
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()
        server.shutdown(socket.SHUT_RDWR)


def listening(pids: Iterable[int]) -> set[Address]:
    """Where processes listen for TCP connections, by the kernel's own tables."""
    found = set()
    for pid in pids:
        inodes = _inodes(pid)
        for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
            try:
                lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
            except OSError:
                continue
            for fields in map(str.split, lines):
                if fields[3] == "0A" and fields[9] in inodes:
                    found.add(_address(fields[1], family))
    return found


def _inodes(pid: int) -> set[str]:
    found = set()
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                found.add(target.removeprefix("socket:[").removesuffix("]"))
    return found


def _address(text: str, family: socket.AddressFamily) -> Address:
    host, port = text.split(":")
    words = struct.unpack(f">{len(host) // 8}I", bytes.fromhex(host))
    return socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words)), int(port, 16)
