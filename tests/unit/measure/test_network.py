"""Packets sent by the routes of a network take exactly the channels of the topology."""

from __future__ import annotations

import pytest

from lightning_autosync.cluster.files import resolve_cluster, shipped_clusters
from lightning_autosync.cluster.link_graph import LinkGraph
from lightning_autosync.cluster.spec import ClusterSpec
from lightning_autosync.errors import ClusterError
from lightning_autosync.measure.emulation.network import LOOPBACK, Network


def travel(network: Network, source: int, target: int, interface: int) -> list[int]:
    """The channels that a packet takes from node to node."""
    place, channels = source, []
    while place != target:
        assert len(channels) < len(network.ports), "the packet goes round in circles"
        route = next(
            route
            for route in network.routes_of(place)
            if route.destination == network.address(target, interface)
            and route.source in (None, network.address(source, interface))
        )
        # A node's own packets leave from the address of the interface by which they leave.
        assert route.origin == (network.address(place, interface) if place < len(network.cluster.nodes) else None)
        (channel,) = (
            index
            for index, port in enumerate(network.ports)
            if port.place == place and port.interface == route.interface
        )
        assert network.ports[channel ^ 1].address == route.gateway
        channels.append(channel)
        place = network.ports[channel ^ 1].place
    return channels


def check_travel(cluster: ClusterSpec) -> None:
    network, topology = Network(cluster), LinkGraph(cluster)
    for interface in range(cluster.interface_count):
        for i, source in enumerate(cluster.rank_nodes):
            for j, target in enumerate(cluster.rank_nodes):
                links = [channel for channel in topology.route(i, j, interface) if channel < 2 * len(cluster.links)]
                assert travel(network, source, target, interface) == links


def places_that_route_by_source(network: Network) -> list[str]:
    return [
        name
        for place, name in enumerate(network.places)
        if any(route.source is not None for route in network.routes_of(place))
    ]


@pytest.mark.parametrize("name", shipped_clusters())
def test_packets_take_the_routes_of_the_topology(name):
    cluster = resolve_cluster(name)
    if not cluster.measured:
        pytest.skip("the rates of this cluster are unknown")
    check_travel(cluster)
    if name != "ring_of_four":
        assert not places_that_route_by_source(Network(cluster))


def test_routes_depend_on_the_sender_where_they_must(diamond):
    check_travel(diamond)
    assert places_that_route_by_source(Network(diamond)) == ["middle"]


def test_ports_send_at_the_rate_of_their_direction():
    cluster = ClusterSpec.from_dict(
        {
            "format": "autosync-cluster/1",
            "name": "pair",
            "nodes": [{"name": "left"}, {"name": "right"}],
            "links": [{"a": "left", "b": "right", "bandwidth": 2e6, "reverse_bandwidth": 1e6}],
        }
    )
    left, right = Network(cluster).ports
    assert (left.place, left.rate, right.place, right.rate) == (0, 2e6, 1, 1e6)
    assert left.address != right.address


def test_a_lone_node_talks_to_itself():
    network = Network(ClusterSpec.from_dict({"format": "autosync-cluster/1", "name": "x", "nodes": [{"name": "a"}]}))
    assert (network.address(0), network.interface(0)) == (LOOPBACK, "lo")


def test_unknown_rates_are_refused():
    with pytest.raises(ClusterError, match="unknown"):
        Network(ClusterSpec.uniform(nodes=2))


def test_addresses_differ_and_interfaces_fit_the_kernel():
    network = Network(ClusterSpec.racks(8, 8, bandwidth=1e6, uplink=1e6))
    assert len({port.address for port in network.ports}) == len(network.ports)
    assert all(len(port.interface) <= 15 for port in network.ports)
