"""Lower bounds on the times of synchronization and of a step, and the times of usual methods.

After synchronizing a size, every rank has the sum of all ranks' data of that many bytes. Sizes are in bytes, times in
seconds and rates in bytes/s. Latencies and protocol overheads are left out, so the times here are lower bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

import numpy

from lightning_autosync.cluster.cuts import Cut, find_cuts, one_switch_cuts
from lightning_autosync.cluster.free_routes import channel_prices
from lightning_autosync.cluster.link_graph import LinkGraph
from lightning_autosync.cluster.packing import EXACT_RANKS
from lightning_autosync.cluster.sketches import class_prices
from lightning_autosync.cluster.spec import ClusterSpec
from lightning_autosync.errors import ClusterError


@dataclass(frozen=True)
class Limit:
    """A bound on how fast sums along trees of ranks can synchronize a cluster, whatever the routes.

    Attributes:
        cuts: cuts that bound the rate, the slowest first; empty for one rank.
        exact: whether trees over all routes reach the bound; otherwise it is a *cut bound*, and the best trees may be
            slower.
        prices: price of a byte on each channel of the slowest cut, by "source > target", read-only; other channels are
            free. A synchronized byte costs at least 1 on any routes, and the bandwidths of the channels cost `rate`.
    """

    cuts: tuple[Cut, ...]
    exact: bool
    prices: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}), compare=False)

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
    return size * max(1 / min(bandwidths), 2 * (len(bandwidths) - 1) / sum(bandwidths))


@lru_cache(maxsize=64)
def synchronization_limit(spec: ClusterSpec) -> Limit:
    """The bound on the synchronization of a cluster, over all routes.

    Each byte is summed along a tree of ranks to its root and copied from there along another tree. Switches only
    forward. For one switch there is a closed form (`one_switch_time`). Otherwise, up to `EXACT_RANKS` ranks, a linear
    program finds the best trees and routes (:mod:`lightning_autosync.cluster.free_routes`), and its dual prices make
    one cut of all channels. For more ranks such a program is solved for classes of alike ranks
    (:func:`.sketches.class_prices`), if there are any. Otherwise the bound is that of the cuts of
    :mod:`lightning_autosync.cluster.cuts`, which may not be reachable.

    Raises:
        ClusterError: the rates of the cluster are unknown.
    """
    spec.require_measured()
    if spec.world_size == 1:
        return Limit((), exact=True)
    link_graph = LinkGraph(spec)
    exact = True
    find_prices = channel_prices if link_graph.world_size <= EXACT_RANKS else class_prices
    if ways_up := _one_switch(spec):
        cuts = one_switch_cuts(link_graph.capacities[ways_up].tolist(), ways_up)
    elif (of_channels := find_prices(link_graph)) is not None:
        priced = numpy.flatnonzero(of_channels)
        cuts = [Cut.priced(link_graph, priced, of_channels[priced])]
    else:
        cuts, exact = find_cuts(link_graph), False
    slowest = zip(cuts[0].channels.tolist(), cuts[0].prices.tolist(), strict=True)
    prices = {link_graph.channels[index].name: price for index, price in slowest}
    return Limit(tuple(cuts), exact, MappingProxyType(prices))


def binding_channels(spec: ClusterSpec) -> dict[str, float]:
    """Share of each channel in the bound on the rate, by "source > target", the largest first; the shares sum to 1.

    The bound rises by at most this share of a percent if the channel gets a percent faster. It may rise by less: the
    prices of `synchronization_limit` still prove a bound then, but other prices may prove a lower one. Of a symmetric
    link, both directions have the same share.

    Raises:
        ClusterError: the rates of the cluster are unknown.
    """
    limit = synchronization_limit(spec)
    bandwidths = {channel.name: channel.bandwidth or 0.0 for channel in LinkGraph(spec).channels}
    shares = {name: price * bandwidths[name] / limit.rate for name, price in limit.prices.items()}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


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
    b_i is the rate at which the rank exchanges equal amounts with all ranks of other nodes over the node's own links,
    which its ranks share equally. On one switch with one rank per node these shares reach the bound. Two ranks send the
    same amount for any shares, so theirs are proportional to b_i.

    Raises:
        ClusterError: the rates of the cluster are unknown.
    """
    spec.require_measured()
    link_graph = LinkGraph(spec)
    rates = [_way_out(link_graph, node) for node in range(len(spec.nodes))]
    ways_out = numpy.array([rates[node] for node in spec.rank_nodes])
    count = len(ways_out)
    weights = ways_out
    if count > 2:
        weights = numpy.maximum(one_switch_time(ways_out.tolist(), 1.0) * ways_out - 1, 0.0) / (count - 2)
    return tuple(float(share) for share in weights / weights.sum())


def _way_out(link_graph: LinkGraph, node: int) -> float:
    """Bytes/s at which a rank of the node both sends to and receives from others; the local rate without others.

    Each pair of ranks has one route. So a link counts as far as routes use it, and not at all if none does.
    """
    spec = link_graph.spec
    own = spec.ranks_of(node)
    others = [rank for rank in range(spec.world_size) if spec.rank_nodes[rank] != node]
    if not spec.links or not others:
        return spec.local_bandwidth
    name = spec.nodes[node].name
    links = [number for number, link in enumerate(spec.links) if name in (link.a, link.b)]
    channels = [2 * number + way for number in links for way in (0, 1)]
    rates = link_graph.capacities[channels]
    if len(links) > 1:
        uses = link_graph.loads([(own[0], other) for other in others] + [(other, own[0]) for other in others])[channels]
        rates = rates[uses > 0] * len(others) / uses[uses > 0]
    return float(rates.min()) / len(own)


def _one_switch(spec: ClusterSpec) -> list[int]:
    """[nodes] channel to the only switch; empty unless each node has one rank and one symmetric link to it."""
    if len(spec.switches) != 1 or len(spec.links) != len(spec.nodes) or any(node.devices > 1 for node in spec.nodes):
        return []
    ends = [{link.a, link.b} - set(spec.switches) for link in spec.links]
    if any(len(end) != 1 for end in ends) or len(set().union(*ends)) != len(spec.nodes):
        return []
    if any(link.bandwidth != link.reverse_bandwidth for link in spec.links):
        return []
    return [2 * index + (link.a in spec.switches) for index, link in enumerate(spec.links)]


def least_step_time(
    spec: ClusterSpec,
    gradients: Iterable[tuple[float, float]],
    forward: float = 0.0,
    backward: float = 0.0,
    optimizer: float = 0.0,
    framing: float = 1.0,
    burst: float = 0.0,
) -> float:
    """Lower bound in seconds on a step under an exact plan, whose sums form along trees of ranks.

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
