"""A cluster as a routed network: the addresses, interfaces and routes that make packets take its links.

Nodes and switches are places that forward packets. Each link is a point-to-point line with two ports. Port ``c`` sends
the traffic of channel ``c`` of :class:`~lightning_autosync.cluster.link_graph.LinkGraph`, and port ``c ^ 1`` receives
it. Packets take exactly the routes of the topology. So any graph of links works, including rings of switches and nodes
that forward.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address

from lightning_autosync.cluster.link_graph import LinkGraph
from lightning_autosync.cluster.spec import ClusterSpec

FIRST_ADDRESS = IPv4Address("10.77.0.0")
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Port:
    """One end of a link.

    Attributes:
        place: index of the place to which the port belongs.
        interface: name of the interface there.
        address: IP address; the two ends of a link share a network of two addresses (/31).
        rate: sending rate in bytes/s.
        delay: seconds by which the link delays what the port sends; 0 if its latency is not emulated.
    """

    place: int
    interface: str
    address: str
    rate: float
    delay: float


@dataclass(frozen=True)
class Route:
    """A place's next hop to a node, for all packets or only for packets from one node.

    Attributes:
        destination: address of the node's interface.
        gateway: address of the neighbouring port.
        interface: interface from which to send.
        source: address of the node that sent the packet; None for packets from anywhere.
        origin: address from which a node's own packets leave; None at a switch.
    """

    destination: str
    gateway: str
    interface: str
    source: str | None = None
    origin: str | None = None


class Network:
    """The ports and routes of the network for a cluster.

    Attributes:
        places: names of the nodes, then of the switches.
        ports: two ports for each link: first that of its end ``a``, which sends at ``bandwidth``, then that of ``b``.

    Raises:
        ClusterError: the rates of the cluster are unknown.
    """

    def __init__(self, cluster: ClusterSpec) -> None:
        cluster.require_measured()
        self.cluster = cluster
        self.places = (*(node.name for node in cluster.nodes), *cluster.switches)
        self.ports = tuple(_ports(cluster, self.places))
        self._uplinks: dict[tuple[int, int], Port] = {}
        for number, port in enumerate(self.ports):
            for interface in range(cluster.interface_count):
                if cluster.carries(interface, cluster.links[number // 2]):
                    self._uplinks.setdefault((port.place, interface), port)
        self._routes = self._find_routes()

    def address(self, node: int, interface: int = 0) -> str:
        """The address of a node's interface: that of its first port, or the loopback address if it has no link."""
        port = self._uplinks.get((node, interface))
        return LOOPBACK if port is None else port.address

    def interface(self, node: int) -> str:
        """The port that carries :meth:`address` of the first interface."""
        port = self._uplinks.get((node, 0))
        return "lo" if port is None else port.interface

    def ports_of(self, place: int) -> list[Port]:
        """The ports of one place."""
        return [port for port in self.ports if port.place == place]

    def routes_of(self, place: int) -> list[Route]:
        """The routes of a place; routes for a single source come before the route for all."""
        return self._routes[place]

    def _find_routes(self) -> dict[int, list[Route]]:
        """Routes by destination, and also by source where the topology sends sources over different links."""
        hops: dict[tuple[int, int, int], dict[int, int]] = defaultdict(dict)
        for source, target, interface, channels in self._paths():
            for channel in channels:
                hops[self.ports[channel].place, target, interface][source] = channel
        routes: dict[int, list[Route]] = {place: [] for place in range(len(self.places))}
        for (place, target, interface), by_source in hops.items():
            # The kernel picks the source address of a place's own packets only after routing, so rules by source cannot
            # match them. So the route for all sources must be the one for the place's own packets.
            common = by_source.get(place, Counter(by_source.values()).most_common(1)[0][0])
            others = [source for source, channel in by_source.items() if channel != common]
            for only in (*others, None):
                channel = common if only is None else by_source[only]
                sender, receiver = self.ports[channel], self.ports[channel ^ 1]
                routes[place].append(
                    Route(
                        self.address(target, interface),
                        receiver.address,
                        sender.interface,
                        None if only is None else self.address(only, interface),
                        self.address(place, interface) if place < len(self.cluster.nodes) else None,
                    )
                )
        return routes

    def _paths(self) -> Iterator[tuple[int, int, int, list[int]]]:
        """Source node, target node, interface, and the channels of links between them."""
        topology = LinkGraph(self.cluster)
        ranks = [self.cluster.ranks_of(node)[0] for node in range(len(self.cluster.nodes))]
        for interface in range(self.cluster.interface_count):
            for source, i in enumerate(ranks):
                for target, j in enumerate(ranks):
                    route = topology.route(i, j, interface)
                    yield source, target, interface, [channel for channel in route if channel < len(self.ports)]


def _ports(cluster: ClusterSpec, places: tuple[str, ...]) -> Iterator[Port]:
    index_of = {name: index for index, name in enumerate(places)}
    for index, link in enumerate(cluster.links):
        for side, (end, _, rate) in enumerate(link.directions):
            address = str(FIRST_ADDRESS + 2 * index + side)
            yield Port(index_of[end], f"link{index}", address, rate, link.emulated_latency)


def emulable(cluster: ClusterSpec, fastest: float) -> ClusterSpec:
    """The cluster as emulated links show it, slowed down so that no link exceeds ``fastest`` bytes/s."""
    return cluster.scaled(min(1.0, fastest / max(cluster.rates, default=1.0))).as_emulated()
