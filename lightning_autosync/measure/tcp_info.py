"""What the kernel (Linux only) counts of TCP connections. Whoever reads it late still reads it right."""

from __future__ import annotations

import os
import socket
import struct
import sys
from contextlib import suppress

# Offsets in ``struct tcp_info`` of Linux 4.19 and later.
_BYTES_RECEIVED, _BYTES_SENT, _ROUND_TRIP = 128, 200, 68


def bytes_received(connection: socket.socket) -> int:
    """Payload bytes that have arrived over a connection since it was made."""
    return _read(connection, _BYTES_RECEIVED, "Q")


def smoothed_round_trip(connection: socket.socket) -> float:
    """Seconds there and back, as TCP estimates them so far."""
    return _read(connection, _ROUND_TRIP, "I") * 1e-6


def bytes_sent() -> int | None:
    """Payload bytes that this process sent so far over the TCP connections that it has open.

    The kernel counts by socket, so neither framing nor other processes are included. None where it does not count.
    """
    if sys.platform != "linux":
        return None
    total = 0
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError), _shared_socket(int(entry)) as connection:  # not a socket, or not TCP
            total += _read(connection, _BYTES_SENT, "Q")
    return total


def _read(connection: socket.socket, offset: int, kind: str) -> int:
    information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, offset + struct.calcsize(kind))
    (value,) = struct.unpack_from(kind, information, offset)
    return int(value)


def _shared_socket(descriptor: int) -> socket.socket:
    """The socket of a descriptor that somebody else owns and that stays open when this one is closed."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
