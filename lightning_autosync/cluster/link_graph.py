"""The cluster as a directed graph of channels, and the route between any two ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

import numpy
from numpy.typing import NDArray
from scipy.sparse import csr_array

from lightning_autosync.cluster.spec import ClusterSpec
from lightning_autosync.errors import ClusterError

if TYPE_CHECKING:
    import networkx

_SECONDS_RESOLUTION = 1e-12


@dataclass(frozen=True)
class Channel:
    """One direction of a link.

    Attributes:
        source, target: name of a node or a switch, or "rank N" for a device that shares its node with others.
        bandwidth: bytes/s; None if the rates of the cluster are unknown.
        latency: seconds.
    """

    source: str
    target: str
    bandwidth: float | None
    latency: float

    @property
    def name(self) -> str:
        """The channel in reports and files: "source > target"."""
        return f"{self.source} > {self.target}"


class LinkTree(NamedTuple):
    """Links that form a tree, in which routes need no search. The reverse of a channel is its index ^ 1.

    Attributes:
        ends: [ranks] place (node, switch or device) of each rank.
        above, channel_up, depth: [places] parent, channel to the parent and number of channels to the root; -1, -1 and
            0 at the root.
    """

    ends: NDArray[numpy.int32]
    above: NDArray[numpy.int32]
    channel_up: NDArray[numpy.int32]
    depth: NDArray[numpy.int32]


class LinkGraph:
    """Channels of a cluster and the routes over them.

    Channels ``2 k`` and ``2 k + 1`` are the two directions of one link. The cluster's links come first, then one local
    link for each rank whose node has several devices. The only device of a node is at the node itself and has no local
    link.

    A route is the path with the smallest latency, then the fewest hops, then the largest bottleneck rate. The way back
    uses the same path if that is optimal, too; so on symmetric links routes are mirror images. A route over an
    interface (0 for the first of each node) uses no links of other interfaces.

    Attributes:
        spec: the cluster.
        channels: the channels.
        ends: [ranks] place of each rank: its node, or "rank N" for a device that shares its node with others.
    """

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self.channels: tuple[Channel, ...] = tuple(_channels(spec))
        self.ends = tuple(_endpoint(spec, rank) for rank in range(spec.world_size))
        self._paths: dict[tuple[int, str], dict[str, tuple[int, ...]]] = {}
        self._routes: dict[tuple[int, int, int], tuple[int, ...]] = {}

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.spec.world_size

    @cached_property
    def capacities(self) -> NDArray[numpy.float64]:
        """[channels] bytes/s of each channel.

        Raises:
            ClusterError: the rates of the cluster are unknown.
        """
        self.spec.require_measured()
        return numpy.array([channel.bandwidth for channel in self.channels], dtype=numpy.float64)

    @cached_property
    def shaped(self) -> NDArray[numpy.float64]:
        """[channels] 1 for the cluster's links, whose idle directions may pass a burst; 0 for local links."""
        return (numpy.arange(len(self.channels)) < 2 * len(self.spec.links)).astype(float)

    @cached_property
    def places(self) -> dict[str, int]:
        """Number of each place that a channel connects, in the order of the channels."""
        names = dict.fromkeys(end for channel in self.channels for end in (channel.source, channel.target))
        return {name: number for number, name in enumerate(names)}

    @cached_property
    def arcs(self) -> NDArray[numpy.int64]:
        """[2, channels] numbers of the places at which each channel starts and ends."""
        ends = [(self.places[channel.source], self.places[channel.target]) for channel in self.channels]
        return numpy.array(ends, dtype=numpy.int64).reshape(-1, 2).T

    @property
    def symmetric(self) -> bool:
        """Whether every link has the same rate in both directions; then ``route(j, i)`` mirrors ``route(i, j)``."""
        return all(
            one.bandwidth == other.bandwidth for one, other in zip(self.channels[::2], self.channels[1::2], strict=True)
        )

    @property
    def single_routes(self) -> bool:
        """Whether the links form a tree, so that there is only one way between any two places."""
        return len(self.places) == len(self.channels) // 2 + 1

    def channels_over(self, interface: int) -> list[int]:
        """Indices of the channels over which connections over an interface may run."""
        links = self.spec.links
        return [
            index
            for index in range(len(self.channels))
            if index // 2 >= len(links) or self.spec.carries(interface, links[index // 2])
        ]

    def route(self, i: int, j: int, interface: int = 0) -> tuple[int, ...]:
        """Indices of the channels from rank ``i`` to rank ``j``, in order; empty if they are the same.

        Raises:
            ClusterError: a rank does not exist, or not every node has the interface.
        """
        for rank in (i, j):
            if not 0 <= rank < self.world_size:
                raise ClusterError(f"rank {rank}: not in 0..{self.world_size - 1} of cluster '{self.spec.name}'")
        if not 0 <= interface < self.spec.interface_count:
            raise ClusterError(
                f"interface {interface}: not in 0..{self.spec.interface_count - 1}, which all nodes have"
            )
        if (interface, i, j) not in self._routes:
            self._routes[interface, i, j] = self._find_route(i, j, interface)
        return self._routes[interface, i, j]

    def bandwidth(self, i: int, j: int, interface: int = 0) -> float:
        """Bytes/s from rank ``i`` to rank ``j`` while no other rank sends; infinite from a rank to itself."""
        return float(self.capacities[list(self.route(i, j, interface))].min(initial=math.inf))

    def latency(self, i: int, j: int) -> float:
        """Latency in seconds from rank ``i`` to rank ``j``."""
        return sum(self.channels[channel].latency for channel in self.route(i, j))

    def loads(self, transfers: Sequence[tuple[int, int]]) -> NDArray[numpy.float64]:
        """[channels] number of uses on the routes of ``transfers`` (pairs of source and target rank)."""
        loads = numpy.zeros(len(self.channels))
        for i, j in transfers:
            loads[list(self.route(i, j))] += 1
        return loads

    def load_rows(
        self, transfers: Iterable[Sequence[tuple[int, int]]], interfaces: Iterable[int] | None = None
    ) -> csr_array:
        """The numbers of uses by several sequences of transfers, as a sparse matrix [sequences, channels].

        ``interfaces`` [sequences] are those over which the transfers run; None is the first for all.
        """
        routes = [
            [channel for pair in pairs for channel in self.route(*pair, interface)]
            for pairs, interface in zip(transfers, repeat(0) if interfaces is None else interfaces, strict=False)
        ]
        ends = numpy.cumsum([0, *map(len, routes)])
        columns = numpy.fromiter((channel for route in routes for channel in route), dtype=numpy.int64)
        rows = csr_array((numpy.ones(len(columns)), columns, ends), shape=(len(routes), len(self.channels)))
        rows.sum_duplicates()
        return rows

    def _find_route(self, i: int, j: int, interface: int) -> tuple[int, ...]:
        source, target = self.ends[i], self.ends[j]
        if (tree := self.trees[interface]) is not None:
            return _climb(tree, i, j)
        if (interface, source) not in self._paths:
            self._paths[interface, source] = self._paths_from(source, interface)
        path = self._paths[interface, source][target]
        if i <= j:
            return path
        back = tuple(channel ^ 1 for channel in reversed(self.route(j, i, interface)))
        return back if self._bottleneck(back) == self._bottleneck(path) else path

    @cached_property
    def trees(self) -> list[LinkTree | None]:
        """For each interface, the links that ranks reach over it; None if they do not form a tree."""
        return [self._tree(interface) for interface in range(self.spec.interface_count)]

    def _tree(self, interface: int) -> LinkTree | None:
        around: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for index in self.channels_over(interface):
            around[self.channels[index].source].append((self.channels[index].target, index))
        reached, channels = [self.ends[0]], 0
        place, above, channel_up, depth = {self.ends[0]: 0}, [-1], [-1], [0]
        for here in reached:
            channels += len(around[here])
            for there, index in around[here]:
                if there not in place:
                    place[there] = len(reached)
                    reached.append(there)
                    above.append(place[here])
                    channel_up.append(index ^ 1)
                    depth.append(depth[place[here]] + 1)
        if channels != 2 * (len(reached) - 1):
            return None
        ends = [place[end] for end in self.ends]
        return LinkTree(*(numpy.array(each, dtype=numpy.int32) for each in (ends, above, channel_up, depth)))

    def _paths_from(self, source: str, interface: int) -> dict[str, tuple[int, ...]]:
        """The widest among the shortest paths to every place; ties are broken by lower channel indices."""
        import networkx  # late: it takes long to import

        graph = self._graphs[interface]
        distance = networkx.single_source_dijkstra_path_length(graph, source)
        paths: dict[str, tuple[int, ...]] = {source: ()}
        for place in distance:  # Dijkstra's order, nearest first: paths to a place are final before they are extended
            for target, edge in graph[place].items():
                if distance[place] + edge["weight"] > distance[target]:
                    continue
                path = (*paths[place], edge["channel"])
                if target not in paths or self._preference(path) < self._preference(paths[target]):
                    paths[target] = path
        return paths

    @cached_property
    def _graphs(self) -> list[networkx.DiGraph]:
        """For each interface, its channels between places."""
        import networkx

        graphs = [networkx.DiGraph() for _ in range(self.spec.interface_count)]
        for interface, graph in enumerate(graphs):
            graph.add_nodes_from(self.places)
            graph.add_nodes_from(self.ends)
            for index in self.channels_over(interface):
                channel = self.channels[index]
                graph.add_edge(channel.source, channel.target, weight=self._length(index), channel=index)
        return graphs

    def _length(self, index: int) -> int:
        """Latency first and hops second in one integer: sums of integers are exact, so equal paths compare equal."""
        ticks = round(self.channels[index].latency / _SECONDS_RESOLUTION)
        return ticks * len(self.channels) + 1

    def _preference(self, path: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        return -self._bottleneck(path), path

    def _bottleneck(self, path: tuple[int, ...]) -> float:
        rates = [self.channels[index].bandwidth for index in path]
        return min((rate for rate in rates if rate is not None), default=math.inf)


def _climb(tree: LinkTree, i: int, j: int) -> tuple[int, ...]:
    """The channels from rank ``i`` to rank ``j``: up from both ends until they meet."""
    one, other = int(tree.ends[i]), int(tree.ends[j])
    front: list[int] = []
    back: list[int] = []
    while one != other:
        if tree.depth[one] >= tree.depth[other]:
            front.append(int(tree.channel_up[one]))
            one = int(tree.above[one])
        else:
            back.append(int(tree.channel_up[other]) ^ 1)
            other = int(tree.above[other])
    return (*front, *reversed(back))


def _channels(spec: ClusterSpec) -> list[Channel]:
    channels = []
    for link in spec.links:
        channels.append(Channel(link.a, link.b, link.bandwidth, link.latency))
        channels.append(Channel(link.b, link.a, link.reverse_bandwidth, link.latency))
    for rank, index in enumerate(spec.rank_nodes):
        node = spec.nodes[index]
        if node.devices > 1:
            end = _endpoint(spec, rank)
            channels.append(Channel(end, node.name, spec.local_bandwidth, spec.local_latency))
            channels.append(Channel(node.name, end, spec.local_bandwidth, spec.local_latency))
    return channels


def _endpoint(spec: ClusterSpec, rank: int) -> str:
    node = spec.nodes[spec.rank_nodes[rank]]
    return f"rank {rank}" if node.devices > 1 else node.name
