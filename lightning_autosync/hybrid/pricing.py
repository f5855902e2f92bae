"""Seconds of collectives along the dimensions of a mesh and of changes of layout, and fitted rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy
from numpy.typing import NDArray
from scipy.optimize import nnls

from lightning_autosync.errors import DocumentError
from lightning_autosync.hybrid.conversions import COLLECTIVES, Collective, States, sent, traffic
from lightning_autosync.hybrid.mesh import Links, Pace
from lightning_autosync.hybrid.plan import groups_along
from lightning_autosync.hybrid.rates import CollectiveRate, HybridRates
from lightning_autosync.replay.rings import WITH_NOTICE, ring_pieces, ring_waiting

BUCKET = 25 * 2**20
"""Approximate bytes of gradients per message."""


@dataclass(frozen=True)
class ChangeSeconds:
    """Seconds of changes between all pairs of states.

    Attributes:
        forward, backward: [from, to] seconds per byte that the value has on a rank under data parallelism.
        forward_calls, backward_calls: [from, to] seconds independent of the size.
    """

    forward: NDArray[numpy.float64]
    backward: NDArray[numpy.float64]
    forward_calls: NDArray[numpy.float64]
    backward_calls: NDArray[numpy.float64]


class Pricing:
    """Costs of collectives on one mesh.

    Args:
        mesh: sizes of the dimensions.
        ranks: rank at each place of the mesh, in row-major order.
    """

    def __init__(self, mesh: Sequence[int], ranks: Sequence[int], links: Links, rates: HybridRates) -> None:
        self.mesh = tuple(mesh)
        self.ranks = tuple(ranks)
        self.rates = rates
        self._gloo = rates.backend == "gloo"
        self.crowd = rates.crowd(math.prod(mesh))
        self._links = links
        self._array = numpy.array(self.ranks, dtype=numpy.int64).reshape(self.mesh)
        self._prices: dict[tuple[Collective, tuple[int, ...]], tuple[float, float]] = {}
        self._changes: dict[tuple[tuple[States, ...], tuple[States, ...], bool], ChangeSeconds] = {}

    def byte_and_call(self, collective: Collective, dimensions: tuple[int, ...]) -> tuple[float, float]:
        """Seconds per byte that a rank sends in a collective along some dimensions, and seconds per call."""
        key = collective, dimensions
        if key not in self._prices:
            self._prices[key] = self._price(collective, dimensions)
        return self._prices[key]

    def _price(self, collective: Collective, dimensions: tuple[int, ...]) -> tuple[float, float]:
        pace = self._links.pace(groups_along(self._array, dimensions))
        peers = math.prod(self.mesh[dimension] for dimension in dimensions) - 1
        rate: CollectiveRate = getattr(self.rates, collective)
        wire = wire_seconds(collective, pace, self._gloo) * self.rates.framing * rate.wire
        latency = pace.latency * latencies(collective, peers + 1, self._gloo)
        return wire + rate.host * self.crowd, (rate.call + rate.peer * peers) * self.crowd + latency

    def gradients(self, dimensions: tuple[int, ...], size: float) -> float:
        """Seconds to sum gradients of ``size`` bytes per rank over the ranks along some dimensions.

        Large messages of gloo hide most latencies: a piece is under way while the one before waits for its notice.
        """
        ranks = math.prod(self.mesh[dimension] for dimension in dimensions)
        if ranks == 1 or size == 0:
            return 0.0
        byte, call = self.byte_and_call("all_reduce", dimensions)
        seconds = byte * sent("all_reduce", ranks) * BUCKET
        if self._gloo:
            latency = self._links.pace(groups_along(self._array, dimensions)).latency
            pieces = 2 * (ranks - 1) * ring_pieces(BUCKET / ranks)
            call += ring_waiting(pieces, seconds, latency) - latency * latencies("all_reduce", ranks, gloo=True)
        return (seconds + call) * size / BUCKET

    @cached_property
    def _costs(self) -> tuple[NDArray[numpy.float64], NDArray[numpy.float64]]:
        """[dimension, collective] seconds per byte sent, and seconds per call."""
        costs = numpy.array(
            [[self.byte_and_call(kind, (dimension,)) for kind in COLLECTIVES] for dimension in range(len(self.mesh))]
        )
        return costs[:, :, 0], costs[:, :, 1]

    def changes(self, sources: tuple[States, ...], goals: tuple[States, ...], has_samples: bool) -> ChangeSeconds:
        """Seconds of the changes from each state of ``sources`` to each state of ``goals``."""
        key = sources, goals, has_samples
        if key not in self._changes:
            sends = traffic(self.mesh, sources, goals, has_samples)
            byte, call = self._costs
            self._changes[key] = ChangeSeconds(
                (sends.forward * byte).sum(axis=(2, 3)),
                (sends.backward * byte).sum(axis=(2, 3)),
                (sends.calls_forward * call).sum(axis=(2, 3)),
                (sends.calls_backward * call).sum(axis=(2, 3)),
            )
        return self._changes[key]


@dataclass(frozen=True)
class CollectiveTiming:
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


def wire_seconds(kind: Collective, pace: Pace, gloo: bool) -> float:
    """Seconds on the links per byte that every rank sends in a collective of gloo or of NCCL."""
    return pace.spread if _is_pairwise(kind, gloo) else pace.ring


def latencies(kind: Collective, ranks: int, gloo: bool) -> int:
    """The number of latencies in a row of a small collective; in gloo, each hop waits for the receiver's notice."""
    hops = 1 if _is_pairwise(kind, gloo) else (2 if kind == "all_reduce" else 1) * (ranks - 1)
    return hops * (WITH_NOTICE if gloo else 1)


def _is_pairwise(kind: Collective, gloo: bool) -> bool:
    """Whether a collective consists of transfers between all pairs of ranks at once."""
    return kind == "all_to_all" or (kind == "reduce_scatter" and gloo)


def fit_rate(timings: Sequence[CollectiveTiming]) -> CollectiveRate:
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
