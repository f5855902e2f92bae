"""Settings of the connections between ranks."""

from __future__ import annotations

import math
import socket
import struct
import sys
from pathlib import Path

_UNSENT_LIMIT = 64 * 1024
"""Bytes that the kernel may hold unsent, so that urgent frames do not queue behind megabytes."""
_SLACK = 2e-3
"""Seconds of sending that may be under way beyond the round trip: a busy host answers late."""
_SMALLEST_WINDOW = 64 * 1024
_MAX_PACING_RATE = 47
"""Linux's SO_MAX_PACING_RATE, which the ``socket`` module does not name."""
_ROUND_TRIP_OFFSET = 68
"""Where ``struct tcp_info`` keeps the smoothed round trip, in microseconds."""


def tune_connection(connection: socket.socket, rate: float | None, pace: float | None = None) -> None:
    """Make a connection ready for frames: non-blocking, no delay, short queues.

    A reduction and a broadcast share every link, and what stands in a link's queue in one direction delays the
    acknowledgements of the other. So where ``rate`` (bytes/s of the route) is known, no more is kept under way than
    the route and a little slack hold; otherwise the kernel decides.

    With ``pace`` (payload bytes/s) the kernel sends no faster than that, but lets the first packet after a pause go at
    once. Only Linux can do it; elsewhere the connections share their link as they will.
    """
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_LIMIT)
    round_trip = _round_trip(connection)
    if rate is not None and round_trip is not None:
        window = max(_SMALLEST_WINDOW, int(rate * (2 * round_trip + _SLACK)))
        # Above its limit the kernel would keep less under way than the route holds; it does better by itself then.
        if window <= _largest_buffer():
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, window)
    if pace is not None and sys.platform == "linux":
        connection.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, struct.pack("@L", round(pace)))


def _largest_buffer() -> float:
    """Bytes up to which the kernel takes a send buffer's size as it is asked for."""
    try:
        return int(Path("/proc/sys/net/core/wmem_max").read_text())
    except (OSError, ValueError):
        return math.inf


def _round_trip(connection: socket.socket) -> float | None:
    """Seconds, as the kernel saw them while connecting; None where it does not tell."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP_OFFSET + 4)
    if len(info) < _ROUND_TRIP_OFFSET + 4:
        return None
    return float(struct.unpack_from("=I", info, _ROUND_TRIP_OFFSET)[0]) * 1e-6
