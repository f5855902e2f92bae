"""Settings of the connections between ranks."""

from __future__ import annotations

import socket
import struct

_UNSENT_LIMIT = 64 * 1024
"""Bytes that the kernel may hold unsent, so that urgent frames do not queue behind megabytes."""
_SLACK = 2e-3
"""Seconds of sending that may be under way beyond the round trip: a busy host answers late."""
_SMALLEST_WINDOW = 64 * 1024
_ROUND_TRIP_OFFSET = 68
"""Where ``struct tcp_info`` keeps the smoothed round trip, in microseconds."""


def tune_connection(connection: socket.socket, rate: float | None) -> None:
    """Make a connection ready for frames: non-blocking, no delay, short queues.

    A reduction and a broadcast share every link, and what stands in a link's queue in one direction delays the
    acknowledgements of the other. So where ``rate`` (bytes/s of the route) is known, no more is kept under way than
    the route and a little slack hold; otherwise the kernel decides.
    """
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_LIMIT)
    round_trip = _round_trip(connection)
    if rate is not None and round_trip is not None:
        window = max(_SMALLEST_WINDOW, int(rate * (2 * round_trip + _SLACK)))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, window)


def _round_trip(connection: socket.socket) -> float | None:
    """Seconds, as the kernel saw them while connecting; None where it does not tell."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP_OFFSET + 4)
    if len(info) < _ROUND_TRIP_OFFSET + 4:
        return None
    return float(struct.unpack_from("=I", info, _ROUND_TRIP_OFFSET)[0]) * 1e-6
