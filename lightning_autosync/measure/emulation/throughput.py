"""What a TCP connection carries, as the kernel counts it: whoever reads it late reads it right."""

from __future__ import annotations

import socket
import struct

_BYTES_RECEIVED = 128
"""Offset of tcpi_bytes_received, 8 bytes, in the kernel's ``struct tcp_info``."""
_ROUND_TRIP = 68
"""Offset of tcpi_rtt, 4 bytes, in microseconds."""


def bytes_received(connection: socket.socket) -> int:
    """Payload bytes that have arrived over a connection since it was made (Linux only)."""
    information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED + 8)
    (received,) = struct.unpack_from("Q", information, _BYTES_RECEIVED)
    return int(received)


def smoothed_round_trip(connection: socket.socket) -> float:
    """Seconds there and back, as TCP sees them so far (Linux only)."""
    information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP + 4)
    (microseconds,) = struct.unpack_from("I", information, _ROUND_TRIP)
    return float(microseconds) * 1e-6
