"""Seconds of collectives along the dimensions of a mesh, and of changes of layout, which consist of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy
from numpy.typing import NDArray

from lightning_autosync.hybrid.conversions import COLLECTIVES, Collective, States, sent, traffic
from lightning_autosync.hybrid.fitting import hops, wire_seconds
from lightning_autosync.hybrid.mesh import Links
from lightning_autosync.hybrid.plan import groups_along
from lightning_autosync.hybrid.rates import CollectiveRate, HybridRates

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
        pairwise_sums = self.rates.backend == "gloo"
        wire = wire_seconds(collective, pace, pairwise_sums) * self.rates.framing * rate.wire
        latency = pace.latency * hops(collective, peers + 1, pairwise_sums)
        return wire + rate.host * self.crowd, (rate.call + rate.peer * peers) * self.crowd + latency

    def gradients(self, dimensions: tuple[int, ...], size: float) -> float:
        """Seconds to sum gradients of ``size`` bytes per rank over the ranks along some dimensions."""
        ranks = math.prod(self.mesh[dimension] for dimension in dimensions)
        if ranks == 1 or size == 0:
            return 0.0
        byte, call = self.byte_and_call("all_reduce", dimensions)
        return byte * sent("all_reduce", ranks) * size + call * size / BUCKET

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
