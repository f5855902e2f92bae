"""TCP's congestion windows: after a pause, a connection over a long way needs some round trips to be fast again."""

from __future__ import annotations

from typing import NamedTuple

import numpy

from lightning_autosync.cluster.units import FRAMING
from lightning_autosync.replay.compiled import compiled
from lightning_autosync.replay.network import Floats

_INITIAL = 10 * 1448 * FRAMING
"""Bytes on the wire of the window of a new connection, and the least ones of a connection after a pause."""
_LEAST_TIMEOUT = 0.2
"""Least seconds of a retransmission timeout beyond the round trip."""
_SHORT = 1e-3
"""Seconds. Where a round trip is shorter, windows grow too fast to matter."""
_EPSILON = 1e-12
"""Seconds within which two times count as equal."""


class Windows(NamedTuple):
    """Congestion windows, as arrays [connections]; times are seconds since a step began.

    Attributes:
        size: bytes that a connection may send before the first of them is acknowledged.
        begun: when the present round trip began.
        used: bytes that left in it.
        sent: when bytes last left.
    """

    size: Floats
    begun: Floats
    used: Floats
    sent: Floats

    @classmethod
    def new(cls, connections: int) -> Windows:
        """The windows of so many new connections."""
        never = numpy.full(connections, -numpy.inf)
        return cls(numpy.full(connections, _INITIAL), never, numpy.zeros(connections), never.copy())

    def pass_by(self, seconds: float) -> None:
        """Let the next step begin so many seconds after the last one began."""
        for times in (self.begun, self.sent):
            times -= seconds


def limited_round_trips(latencies: Floats) -> Floats:
    """The round trips in seconds of connections with these latencies one way; 0 where windows do not matter."""
    round_trips = 2 * latencies
    found: Floats = numpy.where(round_trips < _SHORT, 0.0, round_trips)
    return found


@compiled
def window_room(windows: Windows, number: int, round_trip: float, now: float) -> float:
    """Bytes that the window of a connection allows now; if a round trip has ended, another one begins.

    As in Linux, a window grows with the acknowledgements up to twice what was under way (slow start). That of an idle
    connection is halved for each retransmission timeout, down to that of a new connection
    (``tcp_slow_start_after_idle``).
    """
    if now >= windows.begun[number] + round_trip - _EPSILON:
        windows.size[number] = max(windows.size[number], 2 * windows.used[number])
        windows.begun[number], windows.used[number] = now, 0.0
        timeout = round_trip + _LEAST_TIMEOUT
        idle = now - windows.sent[number] - timeout
        while idle > 0 and windows.size[number] > _INITIAL:
            windows.size[number] = max(_INITIAL, windows.size[number] / 2)
            idle -= timeout
    return float(windows.size[number] - windows.used[number])
