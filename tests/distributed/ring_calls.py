"""What the backend's collectives send, connection by connection."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

import torch
import torch.distributed as dist

_BYTES_SENT = 200
"""Offset of tcpi_bytes_sent, 8 bytes, in ``struct tcp_info``."""
_NUMBERS = 1_000_000

Ends = tuple[str, str]
"""Addresses of a connection: ours and the peer's."""


def traffic(collective: str) -> list[tuple[str, str, int]]:
    """Both ends of each of this process's connections, and the bytes that a collective sent over it."""
    _run(collective)  # connects
    dist.barrier()
    before = _sent()
    _run(collective)
    found = [(*ends, count - before.get(ends, 0)) for ends, count in _sent().items()]
    dist.barrier()
    return found


def _run(collective: str) -> None:
    numbers, size = torch.ones(_NUMBERS), dist.get_world_size()
    if collective == "all_reduce":
        dist.all_reduce(numbers)
    else:
        dist.all_gather([torch.empty(_NUMBERS) for _ in range(size)], numbers)


def _sent() -> dict[Ends, int]:
    made = {}
    for entry in os.listdir("/proc/self/fd"):
        if not Path(f"/proc/self/fd/{entry}").is_socket():
            continue
        with socket.socket(fileno=os.dup(int(entry))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and _is_connected(connection):
                ends = str(connection.getsockname()), str(connection.getpeername())
                information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_SENT + 8)
                made[ends] = struct.unpack_from("Q", information, _BYTES_SENT)[0]
    return made


def _is_connected(connection: socket.socket) -> bool:
    try:
        connection.getpeername()
    except OSError:
        return False
    return True
