"""How fast a cluster can synchronize at best, how fast the usual methods do, and how short a step can be.

To synchronize a size is to leave at every rank the sum of all ranks' data of that many bytes. Sizes are in
bytes, times in seconds and rates in bytes/s. Latencies and protocol overheads are left out, so the least times here
are bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy
from numpy.typing import NDArray
from scipy.sparse import csc_array

from lightning_autosync.cluster.cuts import Cut, find_cuts, one_switch_cuts
from lightning_autosync.cluster.link_graph import LinkGraph
from lightning_autosync.cluster.packing import Packing, generate_columns, mirrored_packing
from lightning_autosync.cluster.spec import ClusterSpec
from lightning_autosync.cluster.trees import Parents, chains, least_arborescence, root_at, stars
from lightning_autosync.errors import ClusterError

TreePair = tuple[Parents, Parents]


EXACT_RANKS = 64
"""Ranks up to which the linear program is solved: its pairs of ranks grow with the square of their number."""


@dataclass(frozen=True)
class Limit:
    """How fast a cluster can synchronize.

    Attributes:
        cuts: each bounds it, the slowest first; none for one rank.
        exact: whether some method reaches the bound; else it is a *cut bound*, and the best method may take longer.
    """

    cuts: tuple[Cut, ...]
    exact: bool

    @property
    def rate(self) -> float:
        """Bytes/s that can be synchronized at most; infinite for one rank."""
        return min((cut.rate for cut in self.cuts), default=math.inf)

    def seconds(self, size: float, burst: float = 0.0) -> float:
        """The least time to synchronize ``size`` bytes.

        Args:
            size: bytes.
            burst: bytes that each direction of a link lets pass at once where it was at rest, as emulated links do:
                so a channel carries up to ``bandwidth x seconds + burst``.
        """
        return max((cut.seconds(size, burst) for cut in self.cuts), default=0.0)


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
    return Limit(tuple(one_switch_cuts(bandwidths)), exact=True).seconds(size)


@lru_cache(maxsize=64)
def synchronization_limit(spec: ClusterSpec) -> Limit:
    """What bounds the synchronization of a cluster.

    Each byte is reduced along some tree to some root and broadcast along some tree from it. For one switch there is a
    closed form (`one_switch_time`). Elsewhere, up to `EXACT_RANKS` ranks, the linear program over all such pairs of
    trees and the routes of :class:`LinkGraph` is solved by column generation; its dual prices make one cut of all
    channels. Where all links are symmetric a pair and its mirror image can be averaged, so trees used both ways are
    enough. For more ranks the cuts of :mod:`lightning_autosync.cluster.cuts` are taken, which may be short of what is
    possible.

    Raises:
        ClusterError: the rates of the cluster are unknown.
    """
    spec.require_measured()
    if spec.world_size == 1:
        return Limit((), exact=True)
    bandwidths = _one_switch(spec)
    if bandwidths:
        return Limit(tuple(one_switch_cuts(bandwidths)), exact=True)
    link_graph = LinkGraph(spec)
    if spec.world_size > EXACT_RANKS:
        return Limit(tuple(find_cuts(link_graph)), exact=False)
    packing: Packing[Any] = mirrored_packing(link_graph) if link_graph.symmetric else _paired_packing(link_graph)
    return Limit((Cut(packing.rate, float(packing.prices[: 2 * len(spec.links)].sum())),), exact=True)


def synchronization_rate(spec: ClusterSpec) -> float:
    """The most bytes/s that the cluster can synchronize; see `synchronization_limit`."""
    return synchronization_limit(spec).rate


def synchronization_time(spec: ClusterSpec, size: float) -> float:
    """The least time to synchronize ``size`` bytes; see `synchronization_limit`."""
    return synchronization_limit(spec).seconds(size)


def ring_time(spec: ClusterSpec, size: float) -> float:
    """The least time of a ring all-reduce in rank order.

    Each rank sends ``2 (n - 1) / n x size`` to the one before it, as gloo does (NCCL chooses for itself); the time
    is that of the channel that all arcs over it together fill the longest.

    Raises:
        ClusterError: the rates of the cluster are unknown.
    """
    link_graph = LinkGraph(spec)
    spec.require_measured()
    count = spec.world_size
    if count == 1:
        return 0.0
    loads = link_graph.loads([(rank, (rank - 1) % count) for rank in range(count)])
    return 2 * (count - 1) / count * size * float((loads / link_graph.capacities).max())


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


def _one_switch(spec: ClusterSpec) -> list[float]:
    """The rate of each node's link where every node has one rank and one symmetric link to one switch; else empty."""
    ends = [{link.a, link.b} - set(spec.switches) for link in spec.links]
    if len(spec.switches) != 1 or len(spec.links) != len(spec.nodes) or any(node.devices > 1 for node in spec.nodes):
        return []
    if any(len(end) != 1 for end in ends) or len(set().union(*ends)) != len(spec.nodes):
        return []
    rates = [link.bandwidth for link in spec.links if link.bandwidth == link.reverse_bandwidth]
    return [rate for rate in rates if rate is not None] if len(rates) == len(spec.links) else []


def _paired_packing(link_graph: LinkGraph) -> Packing[TreePair]:
    """The best packing with one tree to reduce along and another, of the same root, to broadcast along."""
    count = link_graph.world_size
    arcs = [(i, j) for i in range(count) for j in range(count) if i != j]
    arc_loads = link_graph.load_rows([arc] for arc in arcs)

    def load(pairs: Sequence[TreePair]) -> csc_array:
        return link_graph.load_rows(map(_transfers, pairs)).T.tocsc()

    def price(duals: NDArray[numpy.float64]) -> Iterator[TreePair]:
        cost = numpy.zeros((count, count))
        for arc, value in zip(arcs, arc_loads @ duals, strict=True):
            cost[arc] = value
        for root in range(count):
            yield least_arborescence(cost.T, root), least_arborescence(cost, root)

    return generate_columns(link_graph.capacities, _pair_seeds(count), load, price)


def _transfers(pair: TreePair) -> list[tuple[int, int]]:
    """From rank to rank, along one tree to its root and along the other from it."""
    upward, downward = pair
    up = [(rank, parent) for rank, parent in enumerate(upward) if parent >= 0]
    return up + [(parent, rank) for rank, parent in enumerate(downward) if parent >= 0]


def _pair_seeds(count: int) -> Iterator[TreePair]:
    """Every rank as root: of a star, and of a ring (towards it and onwards from it)."""
    starting_at = list(chains(count))
    for root, star in enumerate(stars(count)):
        hub = root_at(star, root, count)
        yield hub, hub
        ending_here = starting_at[(root + 1) % count]
        yield root_at(ending_here, root, count), root_at(starting_at[root], root, count)


def least_step_time(
    spec: ClusterSpec,
    gradients: Iterable[tuple[float, float]],
    forward: float = 0.0,
    backward: float = 0.0,
    optimizer: float = 0.0,
    framing: float = 1.0,
    burst: float = 0.0,
) -> float:
    """The least seconds of a synchronous step, whatever the plan.

    No byte of a gradient travels before some rank has it, and from any moment on the cluster synchronizes at most
    at the rate R of :func:`~lightning_autosync.cluster.bounds.synchronization_rate`. So if B(t) bytes become ready
    at t or later, they are not synchronized before ``forward + t + framing x B(t) / R``; the optimizer needs all of
    them and the end of backward. With the ready times t of the gradients, a step takes at least

        ``forward + max(backward, max over t of t + framing x B(t) / R) + optimizer``

    which is the makespan of one machine of rate R whose jobs have release dates; working them off in the order of
    release attains it. For gradients that are ready at once it is
    :func:`~lightning_autosync.cluster.bounds.synchronization_time`. Latencies and the filling of pipelines are left
    out.

    Where rested links let a burst pass at once, a channel carries ``bandwidth x seconds + burst`` from t on; what this
    saves on the channels that bind is taken off B(t) (see :class:`~lightning_autosync.cluster.Limit`), in every step,
    whether or not its links had a rest. Where nodes differ in speed, gradients are ready when the fastest node has them
    (its share could be summed early), passes and optimizer take as long as on the slowest node, and the last bytes may
    reach the fastest.

    Args:
        spec: the cluster.
        gradients: for each gradient the seconds from the start of backward at which it is ready, and its bytes.
        forward: seconds of the forward pass.
        backward: seconds of the backward pass.
        optimizer: seconds of the optimizer step.
        framing: bytes on the wire for each byte of payload; 1514 / 1448 with TCP/IP on Ethernet.
        burst: bytes that each direction of a link lets pass at once after a rest, as emulated links do; else none.

    Raises:
        ClusterError: the rates of the cluster are unknown, framing is below 1, or a time, size or burst is below 0.
    """
    latest_first = sorted(gradients, reverse=True)
    times = [forward, backward, optimizer, *(time for time, _ in latest_first), *(size for _, size in latest_first)]
    if framing < 1 or min(times) < 0 or burst < 0:
        raise ClusterError("times, sizes and burst: none may be below 0, and framing not below 1")
    limit = synchronization_limit(spec)
    slowest, fastest = min(node.speed for node in spec.nodes), max(node.speed for node in spec.nodes)
    least, remaining = (forward + backward + optimizer) / slowest, 0.0
    for ready, size in latest_first:
        remaining += size
        synchronizing = limit.seconds(framing * remaining, burst)
        least = max(least, (forward + ready + optimizer) / fastest + synchronizing)
    return least
