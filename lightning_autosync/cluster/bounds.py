"""How fast a cluster can synchronize at best, and how fast the usual methods do.

To synchronize a size is to leave at every rank the sum of all ranks' data of that many bytes. Sizes are in
bytes, times in seconds and rates in bytes/s; latencies and protocol overheads are left out, so the
least times here are bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy
from numpy.typing import NDArray

from lightning_autosync.cluster.column_generation import generate_columns
from lightning_autosync.cluster.packing import mirrored_packing
from lightning_autosync.cluster.spec import ClusterSpec
from lightning_autosync.cluster.topology import Topology
from lightning_autosync.cluster.trees import Parents, chains, least_arborescence, root_at, stars
from lightning_autosync.errors import ClusterError

TreePair = tuple[Parents, Parents]


def one_switch_time(bandwidths: Sequence[float], size: float) -> float:
    """The least time on one switch whose links carry ``bandwidths`` either way: a closed form.

    ``size x max(1 / min b, 2 (n - 1) / sum b)``: every rank sends and receives the size once, and all ranks
    together send 2 (n - 1) times the size.

    Raises:
        ClusterError: no bandwidth, or one that is not more than zero.
    """
    if not bandwidths or min(bandwidths) <= 0:
        raise ClusterError("bandwidths: expected one rate of more than zero for each rank")
    if len(bandwidths) == 1:
        return 0.0
    return size * max(1 / min(bandwidths), 2 * (len(bandwidths) - 1) / sum(bandwidths))


@lru_cache(maxsize=64)
def synchronization_rate(spec: ClusterSpec) -> float:
    """The most bytes/s that the cluster can synchronize; infinite for one rank.

    Each byte is reduced along some tree to some root and broadcast along some tree from it; the linear
    program over all such pairs of trees and the routes of :class:`Topology` is solved by column generation.
    Where all links are symmetric a pair and its mirror image can be averaged, so trees used both ways are
    enough.

    Raises:
        ClusterError: the rates of the cluster are unknown.
    """
    topology = Topology(spec)
    spec.require_measured()
    if spec.world_size == 1:
        return math.inf
    if topology.symmetric:
        return mirrored_packing(topology).rate
    return _paired_rate(topology)


def synchronization_time(spec: ClusterSpec, size: float) -> float:
    """The least time to synchronize ``size`` bytes; see :func:`synchronization_rate`."""
    return size / synchronization_rate(spec)


def ring_time(spec: ClusterSpec, size: float) -> float:
    """The least time of a ring all-reduce in rank order.

    Each rank sends ``2 (n - 1) / n x size`` to the next; the time is that of the channel that all arcs
    over it together fill the longest.

    Raises:
        ClusterError: the rates of the cluster are unknown.
    """
    topology = Topology(spec)
    spec.require_measured()
    count = spec.world_size
    if count == 1:
        return 0.0
    loads = topology.loads([(rank, (rank + 1) % count) for rank in range(count)])
    return 2 * (count - 1) / count * size * float((loads / topology.capacities).max())


def server_shares(spec: ClusterSpec) -> tuple[float, ...]:
    """The share of the data that each rank should reduce as a server; the shares sum to 1.

    ``w_i = (T b_i / S - 1) / (n - 2)``, none below 0, with T the closed form of :func:`one_switch_time` and
    b_i the rate of the rank's way out of its node: the node's links, shared equally by its ranks. On one
    switch with a rank per node these shares reach the bound. Two ranks send the same whatever the shares;
    theirs are proportional to b_i.

    Raises:
        ClusterError: the rates of the cluster are unknown.
    """
    spec.require_measured()
    ways_out = numpy.array([_way_out(spec, index) for index in spec.rank_nodes])
    count = len(ways_out)
    weights = ways_out
    if count > 2:
        weights = numpy.maximum(one_switch_time(ways_out.tolist(), 1.0) * ways_out - 1, 0.0) / (count - 2)
    return tuple(float(share) for share in weights / weights.sum())


def _way_out(spec: ClusterSpec, node_index: int) -> float:
    """Bytes/s at which a rank of the node can both send and receive; without links, the local rate."""
    node = spec.nodes[node_index]
    if not spec.links:
        return spec.local_bandwidth
    rates = numpy.array(list(_link_rates(spec, node.name)), dtype=float)
    return float(rates.sum(axis=0).min()) / node.devices


def _link_rates(spec: ClusterSpec, name: str) -> Iterator[tuple[float | None, float | None]]:
    """Out of the node and into it, for each of its links."""
    for link in spec.links:
        if link.a == name:
            yield link.bandwidth, link.reverse_bandwidth
        elif link.b == name:
            yield link.reverse_bandwidth, link.bandwidth


def _paired_rate(topology: Topology) -> float:
    """The best rate with one tree to reduce along and another, of the same root, to broadcast along."""
    count = topology.world_size
    arcs = [(i, j) for i in range(count) for j in range(count) if i != j]
    arc_loads = numpy.array([topology.loads([arc]) for arc in arcs])

    def load(pair: TreePair) -> NDArray[numpy.float64]:
        upward, downward = pair
        transfers = [(rank, parent) for rank, parent in enumerate(upward) if parent >= 0]
        transfers += [(parent, rank) for rank, parent in enumerate(downward) if parent >= 0]
        return topology.loads(transfers)

    def price(duals: NDArray[numpy.float64]) -> Iterator[TreePair]:
        cost = numpy.zeros((count, count))
        for arc, value in zip(arcs, arc_loads @ duals, strict=True):
            cost[arc] = value
        for root in range(count):
            yield least_arborescence(cost.T, root), least_arborescence(cost, root)

    return generate_columns(topology.capacities, _pair_seeds(count), load, price).rate


def _pair_seeds(count: int) -> Iterator[TreePair]:
    """Every rank as root: of a star, and of a ring (towards it and onwards from it)."""
    starting_at = list(chains(count))
    for root, star in enumerate(stars(count)):
        hub = root_at(star, root, count)
        yield hub, hub
        ending_here = starting_at[(root + 1) % count]
        yield root_at(ending_here, root, count), root_at(starting_at[root], root, count)
