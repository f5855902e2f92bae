"""gloo's ring all-reduce: its pieces, and how long it waits for latencies. For the replay and for hybrid plans."""

from __future__ import annotations

import math

_SEGMENT = 2**20
"""Bytes of the largest piece of gloo's ring, which has at least two pieces per rank."""
GLOO_WINDOW = 2
"""Pieces of a gloo ring that a rank has under way: before a third one, it waits for the first."""
WITH_NOTICE = 2
"""Latencies of a hop in gloo: the receiver's notice that it is ready travels to the sender, and then the data back."""


def ring_pieces(part: float) -> int:
    """Number of pieces that each rank sends in a step, whose bytes are ``part``."""
    return max(2, math.ceil(part / _SEGMENT))


def ring_waiting(pieces: int, sent: float, latency: float) -> float:
    """Seconds in which a ring waits for its latencies, less those in which it sends its window's other pieces.

    Args:
        pieces: number of pieces that each rank sends in all steps together.
        sent: seconds in which the links carry them.
        latency: one-way seconds to the next rank.
    """
    others, hop = (GLOO_WINDOW - 1) * sent / pieces, WITH_NOTICE * latency
    return max(0.0, hop - others) * pieces / GLOO_WINDOW + min(hop, others)
