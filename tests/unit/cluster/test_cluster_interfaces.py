"""Nodes with several network interfaces: files, routes, bounds and packed trees."""

from __future__ import annotations

import copy
import itertools
import re
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import numpy
import pytest
import yaml
from cluster_strategies import RATES
from clusters import two_interfaces
from hypothesis import given
from hypothesis import strategies as st
from plans import trees
from sweeps import examples

from lightning_autosync.cluster import (
    ClusterSpec,
    LinkGraph,
    pack_trees,
    resolve_cluster,
    synchronization_rate,
)
from lightning_autosync.cluster.packing import EXACT_RANKS, best_packing
from lightning_autosync.errors import ClusterError

MB = 1e6
FIRST: dict[str, Any] = {"name": "eth0", "address": "10.0.0.1", "links": ["s0"]}
SECOND: dict[str, Any] = {"name": "eth1", "address": "10.1.0.1", "links": ["s1"]}


def document(*interfaces: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Two nodes with links to two switches; the interfaces of the first node."""
    data = copy.deepcopy(two_interfaces([MB] * 2, [MB] * 2).to_dict())
    data["nodes"][0] = {"name": "n0", "interfaces": list(interfaces), **fields}
    return data


MALFORMED = [
    (document(FIRST), "nodes[0].interfaces: none has the link to 's1'; add it to one"),
    (
        document(FIRST, {**SECOND, "links": ["s2"]}),
        "nodes[0].interfaces[1].links[0]: 'n0' has no link to 's2'; allowed: s0, s1",
    ),
    (
        document(FIRST, {**SECOND, "links": ["s1", "s0"]}),
        "nodes[0].interfaces[1].links[1]: the link to 's0' is already that of interface 'eth0'",
    ),
    (
        document(FIRST, {**SECOND, "name": "eth0"}),
        "nodes[0].interfaces[1].name: 'eth0' is the name of another interface",
    ),
    (
        document(FIRST, {**SECOND, "address": "10.0.0.1"}),
        "nodes[0].interfaces[1].address: '10.0.0.1' is the address of interface 'eth0', too; give each",
    ),
    (document(FIRST, {**SECOND, "links": []}), "nodes[0].interfaces[1].links: List should have at least 1 item"),
    (
        document(FIRST, {**SECOND, "speed": 2}),
        "nodes[0].interfaces[1].speed: unknown field; allowed: name, address, links",
    ),
    (
        document(FIRST, SECOND, address="10.0.0.9"),
        "nodes[0]: interfaces[0].address: 10.0.0.1, but the node's address is 10.0.0.9; both must be the same",
    ),
    (document(SECOND, FIRST), "nodes: no path from interface 0 of 'n0' to interface 0 of 'n1'; list interfaces of one"),
]


@pytest.mark.parametrize(("data", "message"), MALFORMED, ids=[message[:40] for _, message in MALFORMED])
def test_malformed_interfaces_name_file_and_field(data: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(ClusterError, match=re.escape(message)) as caught:
        ClusterSpec.load(path)
    assert str(caught.value).startswith(str(path))


def test_a_node_has_the_address_of_its_first_interface() -> None:
    spec = ClusterSpec.from_dict(document(FIRST, SECOND))
    assert [node.address for node in spec.nodes] == ["10.0.0.1", None]
    assert ClusterSpec.from_dict(spec.to_dict()) == spec
    jsonschema.validate(spec.to_dict(), ClusterSpec.json_schema())
    assert ClusterSpec.from_dict(document(FIRST, SECOND, address="10.0.0.1")) == spec


def test_plans_use_the_interfaces_that_all_nodes_have() -> None:
    assert resolve_cluster("two_interfaces").interface_count == 2
    assert ClusterSpec.uniform(3).interface_count == 1
    assert "interfaces" not in ClusterSpec.uniform(3).to_dict()["nodes"][0]
    fewer = two_interfaces([MB] * 3, [MB] * 3).to_dict()
    fewer["nodes"][2] = {"name": "n2", "interfaces": [{"name": "both", "links": ["s0", "s1"]}]}
    assert ClusterSpec.from_dict(fewer).interface_count == 1
    with pytest.raises(ClusterError, match=r"interface 1: not in 0\.\.0, which all nodes have"):
        LinkGraph(ClusterSpec.from_dict(fewer)).route(0, 1, 1)


@pytest.mark.parametrize("trunk", [None, 1e9])
def test_routes_leave_and_enter_nodes_by_their_interface(trunk: float | None) -> None:
    spec = two_interfaces([MB] * 3, [2 * MB] * 3, trunk=trunk)
    link_graph = LinkGraph(spec)
    for interface in range(2):
        for i, j in ((0, 1), (2, 0)):
            names = [link_graph.channels[channel].name for channel in link_graph.route(i, j, interface)]
            assert names == [f"n{i} > s{interface}", f"s{interface} > n{j}"]
            assert link_graph.bandwidth(i, j, interface) == (1 + interface) * MB


@pytest.mark.parametrize("trunk", [None, 1e9])
def test_links_that_form_a_tree_over_each_interface_need_no_search(trunk: float | None) -> None:
    spec = two_interfaces([MB] * 3, [2 * MB] * 3, trunk=trunk)
    link_graph, searching = LinkGraph(spec), LinkGraph(spec)
    searching.__dict__["trees"] = [None, None]
    ways = list(itertools.product(range(3), range(3), range(2)))
    with mock.patch.object(LinkGraph, "_paths_from", side_effect=AssertionError("searched")):
        found = [link_graph.route(*way) for way in ways]
    assert found == [searching.route(*way) for way in ways]


def test_both_interfaces_carry_packed_trees_up_to_the_bound() -> None:
    """By hand: on one interface of four equal nodes the rate is 4 / 6 of a link's."""
    spec = resolve_cluster("two_interfaces")
    packing = pack_trees(spec)
    assert packing.rate == pytest.approx(2 * 125 * MB * 4 / 6, rel=0.02)
    assert synchronization_rate(spec) == pytest.approx(2 * 125 * MB * 4 / 6, rel=1e-5)
    shares = [sum(tree.weight for tree in packing.trees if tree.interface == interface) for interface in range(2)]
    assert shares == pytest.approx([0.5, 0.5], abs=0.02)


def test_unequal_interfaces_carry_trees_in_proportion() -> None:
    packing = pack_trees(two_interfaces([3 * MB] * 4, [MB] * 4))
    shares = [sum(tree.weight for tree in packing.trees if tree.interface == interface) for interface in range(2)]
    assert shares == pytest.approx([0.75, 0.25], abs=0.02)


@pytest.mark.parametrize("second", [MB, 0.5 * MB])
def test_trees_for_many_ranks_are_packed_for_each_interface_by_itself(second: float) -> None:
    """By hand: on one interface of n equal nodes the rate is n / (2 n - 2) of a link's."""
    count = 2 * EXACT_RANKS
    spec = two_interfaces([MB] * count, [second] * count, trunk=MB)  # no route uses the trunk
    with mock.patch("lightning_autosync.cluster.packing.mirrored_packing", side_effect=AssertionError):
        packing = pack_trees(spec)
    assert packing.rate == pytest.approx((MB + second) * count / (2 * count - 2), rel=0.02)
    assert len(packing.trees) <= 256
    shares = [sum(tree.weight for tree in packing.trees if tree.interface == interface) for interface in range(2)]
    assert shares == pytest.approx([MB / (MB + second), second / (MB + second)], abs=0.02)
    check_packing(spec)


@pytest.mark.slow
def test_interfaces_that_share_a_full_link_are_packed_together() -> None:
    """Two racks whose only uplinks carry both interfaces of each node."""
    half = 33
    nodes, links = [], []
    for place in range(2 * half):
        rack = place // half
        leaves = [f"leaf{rack}{number}" for number in range(2)]
        interfaces = [{"name": f"eth{number}", "links": [leaf]} for number, leaf in enumerate(leaves)]
        nodes.append({"name": f"n{place}", "interfaces": interfaces})
        links += [{"a": f"n{place}", "b": leaf, "bandwidth": MB} for leaf in leaves]
    links += [
        {"a": f"leaf{rack}{number}", "b": f"rack{rack}", "bandwidth": 9 * MB}
        for rack in range(2)
        for number in range(2)
    ]
    links.append({"a": "rack0", "b": "rack1", "bandwidth": 0.1 * MB})
    switches = ["rack0", "rack1", "leaf00", "leaf01", "leaf10", "leaf11"]
    fields = {"name": "shared", "nodes": nodes, "switches": switches, "links": links}
    spec = ClusterSpec.from_dict({"format": ClusterSpec.FORMAT, **fields})
    assert pack_trees(spec).rate == pytest.approx(0.1 * MB, rel=0.02)
    check_packing(spec)


@st.composite
def clusters(draw: st.DrawFn) -> ClusterSpec:
    """Two to five nodes with two interfaces of random rates; the directions of half of the links differ."""
    count = draw(st.integers(2, 5))
    rates = st.lists(RATES, min_size=count, max_size=count)
    spec = two_interfaces(draw(rates), draw(rates), trunk=draw(st.none() | RATES))
    data = spec.to_dict()
    if draw(st.booleans()):
        for link in data["links"]:
            link["reverse_bandwidth"] = draw(RATES)
    return ClusterSpec.from_dict(data)


def check_packing(spec: ClusterSpec) -> None:
    """The trees load no link more than it carries, at the rate that is told."""
    packing, link_graph = pack_trees(spec), LinkGraph(spec)
    loads = numpy.zeros(len(link_graph.channels))
    for tree in packing.trees:
        arcs = [(rank, parent) for rank, parent in enumerate(tree.parents) if parent >= 0]
        arcs += [(parent, rank) for rank, parent in enumerate(tree.broadcast or tree.parents) if parent >= 0]
        (used,) = link_graph.load_rows([arcs], [tree.interface]).toarray()
        loads += tree.weight * packing.rate * used
    assert max(loads / link_graph.capacities) == pytest.approx(1)
    assert sum(tree.weight for tree in packing.trees) == pytest.approx(1)


@given(clusters())
@examples(25)
def test_packings_over_interfaces_keep_to_links_and_to_the_bound(spec: ClusterSpec) -> None:
    check_packing(spec)
    packing = pack_trees(spec)
    assert packing.rate >= 0.98 * (1 - 1e-5) * best_packing(LinkGraph(spec)).rate
    assert packing.rate <= (1 + 1e-5) * synchronization_rate(spec)


@given(clusters(), st.data())
@examples(40)
def test_no_plan_over_interfaces_is_faster_than_the_bound(spec: ClusterSpec, data: st.DataObject) -> None:
    """Any trees over any interfaces in any shares, whose directions may use different ones."""
    link_graph, size = LinkGraph(spec), spec.world_size
    loads = numpy.zeros(len(link_graph.channels))
    count = data.draw(st.integers(1, 4))
    for _ in range(count):
        parents = data.draw(trees(size))
        up = [(rank, parent) for rank, parent in enumerate(parents) if parent >= 0]
        ways = [up, [(parent, rank) for rank, parent in up]]
        interfaces = data.draw(st.lists(st.integers(0, 1), min_size=2, max_size=2))
        loads += link_graph.load_rows(ways, interfaces).toarray().sum(axis=0) / count
    assert max(loads / link_graph.capacities) >= (1 - 1e-6) / synchronization_rate(spec)


HERE = [("10.0.0.1", "10.1.0.1"), ("10.0.0.2", "10.1.0.2"), ("10.0.0.3", "10.1.0.3")]


@pytest.mark.parametrize("trunk", [None, 1e9])
def test_a_cluster_without_its_further_interfaces(trunk: float | None) -> None:
    spec = two_interfaces([MB] * 3, [2 * MB] * 3, HERE, trunk)
    first = spec.with_interfaces(1)
    assert first.interface_count == 1
    assert [node.address for node in first.nodes] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert [(link.a, link.b) for link in first.links if link.bandwidth == MB] == [(f"n{n}", "s0") for n in range(3)]
    assert not [link for link in first.links if link.bandwidth == 2 * MB]
    assert ("s1" in first.switches) == (trunk is not None)
    assert pack_trees(first).rate == pytest.approx(pack_trees(two_interfaces([MB] * 3, [1e-3] * 3)).rate, rel=1e-3)
    assert spec.with_interfaces(2) == spec


def test_a_cluster_without_addresses() -> None:
    assert two_interfaces([MB] * 3, [MB] * 3, HERE).without_addresses() == two_interfaces([MB] * 3, [MB] * 3)
