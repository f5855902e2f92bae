"""The paces of the transport's connections by the rule of `lightning_autosync.plan.pacing`, for all ranks at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy
from numpy.typing import NDArray

from lightning_autosync.plan.pacing import HEADROOM, LEAST_PART
from lightning_autosync.replay.network import Floats, Indices, Integers, NetworkArrays, Routes, Trees
from lightning_autosync.replay.pipelines import Flows
from lightning_autosync.replay.stages import Stage

_MOST = 2_000_000
"""Largest number of stages times connections; beyond it, which takes hundreds of ranks, none counts as paced."""


class Paces(NamedTuple):
    """Connections of the transport that have a pace.

    Attributes:
        pairs: [connections] ``source * ranks + target``.
        rates: [connections] most bytes/s on the wire.
        carried: [stages, connections] bytes that each stage sends on them.
    """

    pairs: Indices
    rates: Floats
    carried: Floats

    @classmethod
    def of(
        cls,
        stages: Sequence[Stage],
        flows: Flows,
        trees: Trees,
        network: NetworkArrays,
        work: Floats,
        used: NDArray[numpy.uint64],
    ) -> Paces:
        """The paces of a schedule.

        Args:
            stages: stages of the schedule.
            flows: their flows.
            trees: trees of the flows.
            network: the cluster.
            work, used: ``work`` and ``pairs`` of `Loads`.
        """
        on_trees = numpy.array([not stage.collective and bool(stage.flows) for stage in stages], dtype=numpy.bool_)
        pairs = _both_ways(used[on_trees], network.ranks)
        shape = len(stages), len(pairs)
        if not shape[0] * shape[1] or shape[0] * shape[1] > _MOST:
            return cls(pairs[:0], numpy.zeros(0), numpy.zeros((len(stages), 0)))
        place = numpy.full(network.ranks**2, -1, dtype=numpy.int64)
        place[pairs] = numpy.arange(len(pairs))
        carried, pieces, further = numpy.zeros(shape), numpy.zeros(shape), numpy.zeros(shape)
        _carry(flows, trees, on_trees, place, carried, pieces, further)
        whole = _bandwidths(pairs, network.routes, network.capacities)
        least = (work[:, : network.links] / network.capacities[: network.links]).max(axis=1)
        needed = carried / numpy.where(on_trees, numpy.maximum(least, 1e-300), numpy.inf)[:, None]
        # The sizes of sums of rows are unknown, so they may need the whole route.
        rows = [number for number, stage in enumerate(stages) if stage.growth is not None]
        needed[rows] = numpy.where(carried[rows] > 0, whole, 0.0)
        rate, count = needed.max(axis=0), pieces.sum(axis=0)
        fills = numpy.zeros((1 + max(stage.message for stage in stages), len(pairs)))
        numpy.add.at(fills, [stage.message for stage in stages], further)
        pace = HEADROOM * (1 + fills.max(axis=0) / numpy.maximum(count, 1)) * rate
        nodes = numpy.array(network.link_graph.spec.rank_nodes)
        apart = nodes[pairs // network.ranks] != nodes[pairs % network.ranks]
        paced = apart & (rate > 0) & (LEAST_PART * whole <= rate) & (pace < whole)
        return cls(pairs[paced], pace[paced], carried[:, paced])


def _both_ways(used: NDArray[numpy.uint64], ranks: int) -> Indices:
    """The pairs of ranks that some stage connects, and their reverse; ``used`` has a bit set for each stage."""
    merged = numpy.bitwise_or.reduce(used, axis=0)
    bits = numpy.unpackbits(merged.astype("<u8").view(numpy.uint8), bitorder="little")[: ranks**2]
    table = bits.reshape(ranks, ranks)
    return numpy.flatnonzero(table | table.T)


@numba.njit(cache=True)
def _carry(
    flows: Flows,
    trees: Trees,
    on_trees: NDArray[numpy.bool_],
    place: Indices,
    carried: Floats,
    pieces: Floats,
    further: Floats,
) -> None:
    """Fill in [stages, pairs] bytes, the most pieces of a flow between two ranks, and hops after a piece's first."""
    ranks = trees.parents.shape[1]
    for flow in range(len(flows.stage)):
        stage = flows.stage[flow]
        if not on_trees[stage]:
            continue
        ways = (flows.up[flow], flows.down[flow])
        hops = _depth(trees.parents, trees.order, ways[0]) + _depth(trees.parents, trees.order, ways[1]) - 1
        for way in range(2):
            if ways[way] < 0:
                continue
            for rank in range(ranks):
                parent = trees.parents[ways[way], rank]
                if parent < 0:
                    continue
                up, down = place[rank * ranks + parent], place[parent * ranks + rank]
                carried[stage, up if way == 0 else down] += flows.copies[flow] * flows.wire[flow]
                for pair in (up, down):
                    pieces[stage, pair] = max(pieces[stage, pair], flows.pieces[flow])
                    further[stage, pair] = max(further[stage, pair], hops)


@numba.njit(cache=True)
def _depth(parents: Integers, order: Integers, tree: int) -> int:
    """Number of hops from the root of a tree to its farthest rank; 0 for no tree."""
    if tree < 0:
        return 0
    depths = numpy.zeros(parents.shape[1], dtype=numpy.int64)
    for place in range(parents.shape[1]):
        rank = order[tree, place]
        if parents[tree, rank] >= 0:
            depths[rank] = depths[parents[tree, rank]] + 1
    return int(depths.max())


@numba.njit(cache=True)
def _bandwidths(pairs: Indices, routes: Routes, capacities: Floats) -> Floats:
    """[pairs] bytes/s between two ranks while no other rank sends."""
    ranks = len(routes.between)
    rates = numpy.full(len(pairs), numpy.inf)
    for place in range(len(pairs)):
        route = routes.between[pairs[place] // ranks, pairs[place] % ranks]
        for hop in range(routes.starts[route], routes.starts[route + 1]):
            rates[place] = min(rates[place], capacities[routes.hops[hop]])
    return rates
