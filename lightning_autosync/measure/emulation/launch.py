"""Emulates a cluster's links on one Linux machine with network namespaces and token buckets."""

from __future__ import annotations

import itertools
import os
import warnings
import weakref
from collections.abc import Mapping, Sequence

from lightning_autosync.cluster.spec import ClusterSpec
from lightning_autosync.measure.emulation import netns
from lightning_autosync.measure.emulation.delays import TAP_QUEUE, End, Relay
from lightning_autosync.measure.emulation.network import Network, Port
from lightning_autosync.measure.launches.launch import StartedCommand
from lightning_autosync.ports import ADDRESSES

BURST = "128kb"  # large enough for a segmentation-offloaded packet of 64 KiB, small enough to be used up soon
QUEUE = "100ms"
UNDER_WAY = 100_000  # packets that `netem` may delay at once, enough for 1 Gbit/s over a second
KERNEL_PARAMETERS: dict[str, str | int] = {
    "ipv4/ip_forward": 1,
    "ipv4/conf/all/rp_filter": 0,  # the two directions of a route may differ, and the filter would drop such packets
    "ipv4/conf/default/rp_filter": 0,
    "ipv4/tcp_congestion_control": "reno",  # BBR's probing is unsteady on a token bucket
}

_emulations = itertools.count()
_held: set[str] = set()
"""Names of the namespaces of this process's live networks."""


class EmulatedLaunch:
    """Runs ranks on this machine that reach each other over emulated links of a cluster.

    Every node and every switch is a network namespace. Every link is a pair of virtual Ethernet ports, each of which
    sends at its rate through a token bucket (``tc tbf``). Rates include TCP/IP framing: 1448 of 1514 bytes on a link
    are payload. After a pause, up to 128 KiB (the burst) pass at once. Ranks of one node share its namespace and reach
    each other at the speed of this machine, whatever ``local_bandwidth`` states.

    A link with a latency above `HIDDEN_LATENCY` delays all packets by it, in each direction. The kernel does that if it
    has ``netem``. Otherwise a child process does it, and the ports of these links are TAP devices.

    The constructor creates the network, which any number of pools can use. It is removed by :meth:`close`, at the end
    of a ``with`` block, when it is no longer referenced, and when this process ends, even by SIGKILL. Networks are
    isolated from each other and from the machine's own network. The constructor first deletes networks that ended
    processes left behind, whose janitors were killed too.

    Raises:
        LaunchError: the system is not Linux, the user is not root, or ``ip``, ``tc`` or a TAP device is missing or
            fails.
        ClusterError: the rates of the cluster are unknown.
    """

    parting = 0.0

    def __init__(self, cluster: ClusterSpec) -> None:
        netns.require_namespaces()
        netns.remove_stale(_held)
        self.cluster = cluster
        self.network = Network(cluster)
        emulation = next(_emulations)
        self.namespaces = [netns.namespace_name(emulation, place) for place in range(len(self.network.places))]
        _held.update(self.namespaces)
        # The janitor starts before the network exists, so that a kill during set-up leaves nothing behind.
        janitor = netns.Janitor(self.namespaces)
        self._relays: list[Relay] = []
        self._finalizer = weakref.finalize(self, _take_down, self.namespaces, janitor, self._relays, os.getpid())
        try:
            self._set_up()
        except BaseException:
            self.close()
            raise

    @property
    def world_size(self) -> int:
        return self.cluster.world_size

    @property
    def address(self) -> str:
        return self.network.address(self.cluster.rank_nodes[0])

    @property
    def relays(self) -> Sequence[int]:
        return [relay.pid for relay in self._relays]

    def command(self, rank: int, command: Sequence[str], variables: Mapping[str, str]) -> StartedCommand:
        namespace = self.namespaces[self.cluster.rank_nodes[rank]]
        return ["ip", "netns", "exec", namespace, *command], {**os.environ, **variables}

    def environment(self, rank: int) -> dict[str, str]:
        node = self.cluster.rank_nodes[rank]
        return {
            ADDRESSES: ",".join(self.network.address(node, one) for one in range(self.cluster.interface_count)),
            "GLOO_SOCKET_IFNAME": self.network.interface(node),
            # All nodes are one machine, but NCCL shall send over the emulated links.
            "NCCL_HOSTID": self.namespaces[node],
            "NCCL_SOCKET_IFNAME": self.network.interface(node),
            "NCCL_NET": "Socket",
            "LOCAL_RANK": str(self.cluster.ranks_of(node).index(rank)),
            "GROUP_RANK": str(node),
        }

    def close(self) -> None:
        """Remove the network; may be called again."""
        self._finalizer()

    def __enter__(self) -> EmulatedLaunch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _set_up(self) -> None:
        netns.configure("ip", [f"netns add {name}" for name in self.namespaces])
        ports = self.network.ports
        links = list(zip(ports[::2], ports[1::2], strict=True))
        delayed = [link for link in links if link[0].delay]
        netem = bool(delayed) and netns.has_netem(self.namespaces[0])
        if delayed and not netem:
            self._relays.append(Relay([(self._end(one), self._end(other), one.delay) for one, other in delayed]))
            links = [link for link in links if not link[0].delay]
        netns.configure("ip", [self._pair_line(*link) for link in links])
        for place, namespace in enumerate(self.namespaces):
            netns.set_kernel_parameters(KERNEL_PARAMETERS, namespace)
            netns.configure("ip", self._interface_lines(place), namespace)
            lines = [line for port in self.network.ports_of(place) for line in shaping_lines(port, netem)]
            netns.configure("tc", lines, namespace)
        # The kernel accepts a route only if the ports at both ends of its link are up, so routes need a second loop.
        for place, namespace in enumerate(self.namespaces):
            netns.configure("ip", self._route_lines(place), namespace)

    def _end(self, port: Port) -> End:
        return self.namespaces[port.place], port.interface

    def _pair_line(self, one: Port, other: Port) -> str:
        return (
            f"link add {one.interface} netns {self.namespaces[one.place]} type veth "
            f"peer name {other.interface} netns {self.namespaces[other.place]}"
        )

    def _interface_lines(self, place: int) -> list[str]:
        lines = ["link set lo up"]
        for port in self.network.ports_of(place):
            lines += [f"addr add {port.address}/31 dev {port.interface}", f"link set {port.interface} up"]
            if port.delay:
                lines.append(f"link set {port.interface} txqueuelen {TAP_QUEUE}")
        return lines

    def _route_lines(self, place: int) -> list[str]:
        """Commands that add routes: those for all sources to the main table, those for one source to its own table."""
        lines = []
        tables: dict[str, int] = {}
        for route in self.network.routes_of(place):
            # A node has an address on each port, but the other nodes have routes to the first one of an interface only.
            origin = "" if route.origin is None else f" src {route.origin}"
            line = f"route add {route.destination}/32 via {route.gateway} dev {route.interface}{origin}"
            if route.source is not None:
                if route.source not in tables:
                    tables[route.source] = len(tables) + 1
                    lines.append(f"rule add from {route.source}/32 lookup {tables[route.source]}")
                line += f" table {tables[route.source]}"
            lines.append(line)
        return lines


def shaping_lines(port: Port, netem: bool) -> list[str]:
    """Commands for ``tc`` that limit a port's rate, and that delay its packets if the kernel has ``netem``."""
    bits = round(port.rate * 8)
    bucket = f"tbf rate {bits}bit burst {BURST} latency {QUEUE}"
    if not (port.delay and netem):
        return [f"qdisc add dev {port.interface} root {bucket}"]
    return [
        f"qdisc add dev {port.interface} root handle 1: netem delay {port.delay * 1e6:.0f}us limit {UNDER_WAY}",
        f"qdisc add dev {port.interface} parent 1:1 {bucket}",
    ]


def _take_down(namespaces: Sequence[str], janitor: netns.Janitor, relays: Sequence[Relay], owner: int) -> None:
    if os.getpid() != owner:  # a forked copy of this process must not remove its parent's network
        return
    for relay in relays:
        if not relay.end():
            warnings.warn("emulated links: the process that delays packets ended early, which cut links", stacklevel=2)
    left = netns.delete(namespaces)
    _held.difference_update(set(namespaces) - set(left))
    if not left:
        janitor.dismiss()
        return
    janitor.release()
    warnings.warn(
        f"emulated links: the network namespaces {', '.join(left)} cannot be deleted; a background process keeps "
        "trying for a minute; `ip netns delete NAME` shows the reason",
        stacklevel=2,
    )
