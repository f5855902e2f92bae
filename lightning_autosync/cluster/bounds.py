"""Lower bounds on the times of synchronization and of a step, and the times of usual methods.

After synchronizing a size, every rank has the sum of all ranks' data of that many bytes. Sizes are in bytes, times in
seconds and rates in bytes/s. Latencies and protocol overheads are left out, so the times here are lower bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy

from lightning_autosync.cluster.cuts import Cut, find_cuts, one_switch_cuts
from lightning_autosync.cluster.link_graph import LinkGraph
from lightning_autosync.cluster.packing import EXACT_RANKS, best_packing
from lightning_autosync.cluster.sketches import class_prices
from lightning_autosync.cluster.spec import ClusterSpec
from lightning_autosync.errors import ClusterError


@dataclass(frozen=True)
class Limit:
    """A bound on how fast a cluster can synchronize.

    Attributes:
        cuts: cuts that bound the rate, the slowest first; empty for one rank.
        exact: whether some method reaches the bound; otherwise it is a *cut bound*, and the best method may be slower.
    """

    cuts: tuple[Cut, ...]
    exact: bool

    @property
    def rate(self) -> float:
        """Largest rate of synchronization in bytes/s; infinite for one rank."""
        return min((cut.rate for cut in self.cuts), default=math.inf)

    def seconds(self, size: float, burst: float = 0.0) -> float:
        """Lower bound in seconds on synchronizing ``size`` bytes.

        Args:
            size: bytes to synchronize.
            burst: bytes that each direction of an idle link passes at once, as emulated links do. A channel then
                carries up to ``bandwidth x seconds + burst``.
        """
        return max((cut.seconds(size, burst) for cut in self.cuts), default=0.0)


def one_switch_time(bandwidths: Sequence[float], size: float) -> float:
    """The minimal time in seconds on one switch whose links carry ``bandwidths`` in each direction: a closed form.

    ``size x max(1 / min b, 2 (n - 1) / sum b)``: every rank sends and receives the size once, and all ranks
    together send 2 (n - 1) times the size.

    Raises:
        ClusterError: there is no bandwidth, or one is not above zero.
    """
    if not bandwidths or min(bandwidths) <= 0:
        raise ClusterError("bandwidths: expected one rate of more than zero for each rank")
    if len(bandwidths) == 1:
        return 0.0
    return Limit(tuple(one_switch_cuts(bandwidths)), exact=True).seconds(size)


@lru_cache(maxsize=64)
def synchronization_limit(spec: ClusterSpec) -> Limit:
    """The bound on the synchronization of a cluster.

    Each byte is reduced along a tree to its root and broadcast from there along another tree. For one switch there is a
    closed form (`one_switch_time`). Otherwise, up to `EXACT_RANKS` ranks, column generation solves the linear program
    over all pairs of trees with the routes of :class:`LinkGraph`, and its dual prices make one cut of all channels. If
    all links are symmetric, a pair and its mirror image can be averaged, so trees used in both directions are enough.
    For more ranks that program is solved for classes of alike ranks (:func:`.sketches.class_prices`), if there are any.
    Otherwise the bound is that of the cuts of :mod:`lightning_autosync.cluster.cuts`, which may not be reachable.

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
    prices = best_packing(link_graph).prices if spec.world_size <= EXACT_RANKS else class_prices(link_graph)
    if prices is None:
        return Limit(tuple(find_cuts(link_graph)), exact=False)
    # Only the cluster's links may have bursts, so the prices of local links, which follow them, are left out.
    links = float(prices[: 2 * len(spec.links)].sum())
    return Limit((Cut(float(link_graph.capacities @ prices), links),), exact=True)


def synchronization_rate(spec: ClusterSpec) -> float:
    """Largest rate in bytes/s at which the cluster can synchronize; see `synchronization_limit`."""
    return synchronization_limit(spec).rate


def synchronization_time(spec: ClusterSpec, size: float) -> float:
    """Lower bound in seconds on synchronizing ``size`` bytes; see `synchronization_limit`."""
    return synchronization_limit(spec).seconds(size)


def ring_time(spec: ClusterSpec, size: float) -> float:
    """Lower bound in seconds on a ring all-reduce in rank order.

    Each rank sends ``2 (n - 1) / n x size`` to the previous one, as in gloo (NCCL chooses its own order). The time is
    that of the busiest channel, which may carry several arcs of the ring.

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
    """[ranks] share of the data that each rank should reduce as a server; the shares sum to 1.

    ``w_i = (T b_i / S - 1) / (n - 2)``, but at least 0. T is the closed form of :func:`one_switch_time` for size S, and
    b_i is the rate of the rank's way out of its node: the node's links, shared equally by its ranks. On one switch with
    one rank per node these shares reach the bound. Two ranks send the same amount for any shares, so theirs are
    proportional to b_i.

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
    """Bytes/s at which a rank of the node can both send and receive; the local rate if there are no links."""
    node = spec.nodes[node_index]
    if not spec.links:
        return spec.local_bandwidth
    rates = numpy.array(list(_link_rates(spec, node.name)), dtype=float)
    return float(rates.sum(axis=0).min()) / node.devices


def _link_rates(spec: ClusterSpec, name: str) -> Iterator[tuple[float | None, float | None]]:
    """Bytes/s out of the node and into it, for each of its links."""
    for link in spec.links:
        if link.a == name:
            yield link.bandwidth, link.reverse_bandwidth
        elif link.b == name:
            yield link.reverse_bandwidth, link.bandwidth


def _one_switch(spec: ClusterSpec) -> list[float]:
    """[nodes] rate of each node's link if every node has one rank and one symmetric link to one switch; else empty."""
    ends = [{link.a, link.b} - set(spec.switches) for link in spec.links]
    if len(spec.switches) != 1 or len(spec.links) != len(spec.nodes) or any(node.devices > 1 for node in spec.nodes):
        return []
    if any(len(end) != 1 for end in ends) or len(set().union(*ends)) != len(spec.nodes):
        return []
    rates = [link.bandwidth for link in spec.links if link.bandwidth == link.reverse_bandwidth]
    return [rate for rate in rates if rate is not None] if len(rates) == len(spec.links) else []


def least_step_time(
    spec: ClusterSpec,
    gradients: Iterable[tuple[float, float]],
    forward: float = 0.0,
    backward: float = 0.0,
    optimizer: float = 0.0,
    framing: float = 1.0,
    burst: float = 0.0,
) -> float:
    """Lower bound in seconds on a synchronous step, for every plan.

    No byte of a gradient is sent before some rank has it, and the cluster never synchronizes faster than the rate R of
    :func:`~lightning_autosync.cluster.bounds.synchronization_rate`. So if B(t) bytes become ready at t or later, they
    are not synchronized before ``forward + t + framing x B(t) / R``. The optimizer needs all of them and the end of
    backward. With the ready times t of the gradients, a step takes at least

        ``forward + max(backward, max over t of t + framing x B(t) / R) + optimizer``

    This is the makespan of one machine of rate R whose jobs have release dates; processing them in the order of release
    attains it. If all gradients are ready at once it is
    :func:`~lightning_autosync.cluster.bounds.synchronization_time`. Latencies and the filling of pipelines are left
    out.

    If idle links pass a burst at once, a channel carries ``bandwidth x seconds + burst`` from t on. B(t) is reduced by
    what this saves on the binding channels (see :class:`~lightning_autosync.cluster.Limit`) in every step, even if its
    links were never idle. If nodes differ in speed, gradients are ready when the fastest node has them (its share could
    be summed early), passes and optimizer take as long as on the slowest node, and the last bytes may arrive at the
    fastest node.

    Args:
        spec: the cluster.
        gradients: for each gradient its ready time, in seconds from the start of backward, and its bytes.
        forward: seconds of the forward pass.
        backward: seconds of the backward pass.
        optimizer: seconds of the optimizer step.
        framing: bytes on the wire for each byte of payload; 1514 / 1448 with TCP/IP on Ethernet.
        burst: bytes that each direction of an idle link passes at once, as emulated links do; 0 for other links.

    Raises:
        ClusterError: the rates of the cluster are unknown, framing is below 1, or a time, size or burst is below 0.
    """
    latest_first = sorted(gradients, reverse=True)
    times = [forward, backward, optimizer, *(time for time, _ in latest_first), *(size for _, size in latest_first)]
    if framing < 1 or min(times) < 0 or burst < 0:
        raise ClusterError("times, sizes and burst: each must be 0 or more; framing must be 1 or more")
    limit = synchronization_limit(spec)
    slowest, fastest = min(node.speed for node in spec.nodes), max(node.speed for node in spec.nodes)
    least, remaining = (forward + backward + optimizer) / slowest, 0.0
    for ready, size in latest_first:
        remaining += size
        synchronizing = limit.seconds(framing * remaining, burst)
        least = max(least, (forward + ready + optimizer) / fastest + synchronizing)
    return least
