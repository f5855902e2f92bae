"""Counters of TCP connections in the kernel (Linux only). They stay exact however late a process reads them."""

from __future__ import annotations

import os
import socket
import struct
import sys
from contextlib import suppress

# Offsets in ``struct tcp_info`` of Linux 4.19 and later.
_BYTES_RECEIVED, _BYTES_SENT, _ROUND_TRIP, _LEAST_ROUND_TRIP = 128, 200, 68, 148


def bytes_received(connection: socket.socket) -> int:
    """Payload bytes received over a connection since it was opened."""
    return _read(connection, _BYTES_RECEIVED, "Q")


def smoothed_round_trip(connection: socket.socket) -> float:
    """TCP's current estimate of the round-trip time, in seconds."""
    return _read(connection, _ROUND_TRIP, "I") * 1e-6


def least_round_trip(connection: socket.socket) -> float:
    """The least round-trip time that TCP has seen, in seconds: between kernels, without the processes' wake-up."""
    return _read(connection, _LEAST_ROUND_TRIP, "I") * 1e-6


def bytes_sent() -> int | None:
    """Payload bytes sent so far over all open TCP connections of this process; None if the kernel does not count.

    The kernel counts by socket, so neither framing nor other processes are included.
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
    """A socket on a duplicate of a descriptor, so that closing it leaves the owner's socket open."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
