"""Fits rates of collectives to measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from scipy.optimize import nnls

from lightning_autosync.errors import DocumentError
from lightning_autosync.hybrid.conversions import Collective
from lightning_autosync.hybrid.mesh import Pace
from lightning_autosync.hybrid.rates import CollectiveRate


@dataclass(frozen=True)
class Timing:
    """A measurement of a collective with all groups active at once.

    Attributes:
        ranks: number of ranks in a group.
        sent: bytes that each rank sends.
        wire: seconds on the links, computed from their rates.
        latency: seconds because of the links' latencies, computed.
        seconds: measured seconds.
    """

    ranks: int
    sent: float
    wire: float
    latency: float
    seconds: float


def wire_seconds(kind: Collective, pace: Pace, pairwise_sums: bool) -> float:
    """Seconds on the links per byte that every rank sends in a collective.

    Args:
        pairwise_sums: whether a reduce-scatter consists of transfers between all pairs of ranks.
    """
    pairwise = kind == "all_to_all" or (kind == "reduce_scatter" and pairwise_sums)
    return pace.spread if pairwise else pace.ring


def hops(kind: Collective, ranks: int, pairwise_sums: bool) -> int:
    """The number of sequential hops of a collective, each of which takes the latency once."""
    if kind == "all_to_all" or (kind == "reduce_scatter" and pairwise_sums):
        return 1
    return (2 if kind == "all_reduce" else 1) * (ranks - 1)


def fit_rate(timings: Sequence[Timing]) -> CollectiveRate:
    """Fit the rate of one kind of collective: non-negative least squares of relative errors.

    Raises:
        DocumentError: there are fewer than two timings.
    """
    if len(timings) < 2:
        raise DocumentError(f"rates: got {len(timings)} timings of a collective; at least two sizes are needed")
    rows = numpy.array([[1.0, one.ranks - 1.0, one.sent, one.wire] for one in timings])
    seconds = numpy.array([max(one.seconds - one.latency, 0.05 * one.seconds) for one in timings])
    # Host and wire time per byte must be separable. If links are too fast to matter, all of it is attributed to the
    # hosts; if all paces are similar, all of it is attributed to the links.
    paces = [one.wire / one.sent for one in timings]
    if max(one.wire / one.seconds for one in timings) < 0.05:
        rows[:, 3] = 0.0
    elif max(paces) < 2 * min(paces):
        rows[:, 2] = 0.0
    weights = 1 / seconds
    scale = numpy.maximum(rows.max(axis=0), 1e-30)
    found, _ = nnls(rows / scale * weights[:, None], seconds * weights)
    call, peer, host, wire = found / scale
    return CollectiveRate(call=call, peer=peer, host=host, wire=min(max(wire, 0.1), 100.0) if wire else 0.1)
