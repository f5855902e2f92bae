from __future__ import annotations

import itertools
import math

import numpy
import pytest
from cluster_strategies import RATES, fabrics, leaves_and_spines, random_clusters, two_links_a_node
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog
from sweeps import examples

from lightning_autosync.cluster import (
    ClusterSpec,
    LinkGraph,
    one_switch_time,
    pack_trees,
    resolve_cluster,
    ring_time,
    server_shares,
    shipped_clusters,
    synchronization_rate,
    synchronization_time,
)
from lightning_autosync.cluster.cuts import find_cuts
from lightning_autosync.cluster.packing import best_packing
from lightning_autosync.errors import ClusterError
from lightning_autosync.plan import builders, compile_plan
from lightning_autosync.replay import Constants, Replay, synchronization_bound
from lightning_autosync.workload import Variable, Workload

MB = 1e6
MIB = 2.0**20


def flow_bound(spec: ClusterSpec, all_routes: bool) -> float:
    """The same optimum from arcs and flows instead of trees: arc capacities for each root and direction,
    and inside them a flow of the root's rate to (or from) every other rank. The capacities of arcs take their routes,
    or are flows over all channels themselves."""
    link_graph = LinkGraph(spec)
    count, channels, scale = spec.world_size, link_graph.channels, float(link_graph.capacities.min())
    arcs = list(itertools.permutations(range(count), 2))
    flows = [(r, way, v) for r in range(count) for way in (0, 1) for v in range(count) if v != r]
    rates = {r: r for r in range(count)}
    capacity = {key: count + k for k, key in enumerate(itertools.product(range(count), (0, 1), arcs))}
    start = count + len(capacity)
    flow = {key: start + k for k, key in enumerate(itertools.product(flows, arcs))}
    sent = {key: start + len(flow) + k for k, key in enumerate(itertools.product(range(count), range(len(channels))))}
    size = start + len(flow) + len(sent)
    above, equal = [], []
    for key, arc in flow:
        row = numpy.zeros(size)
        row[flow[key, arc]], row[capacity[key[0], key[1], arc]] = 1, -1
        above.append(row)
    for channel in range(len(channels)):
        row = numpy.zeros(size)
        for (_, _, arc), column in capacity.items():
            row[column] = 0 if all_routes else link_graph.route(*arc).count(channel)
        row[[sent[i, channel] for i in range(count)]] = 1
        above.append(row / link_graph.capacities[channel] * scale)
    for r, way, v in flows:
        for place in range(count):
            row = numpy.zeros(size)
            for i, j in arcs:
                row[flow[(r, way, v), (i, j)]] = (i == place) - (j == place)
            row[rates[r]] = ((place == v) - (place == r)) * (1 if way == 0 else -1)
            equal.append(row)
    for i, place in itertools.product(range(count) if all_routes else (), {one.source for one in channels}):
        row = numpy.zeros(size)
        for channel, one in enumerate(channels):
            row[sent[i, channel]] = (one.source == place) - (one.target == place)
        for (_, _, (source, target)), column in capacity.items():
            if source == i:
                row[column] = (link_graph.ends[target] == place) - (link_graph.ends[source] == place)
        equal.append(row)
    limits = numpy.append(numpy.zeros(len(flow)), numpy.ones(len(channels)))
    goal = numpy.append(-numpy.ones(count), numpy.zeros(size - count))
    result = linprog(goal, numpy.array(above), limits, numpy.array(equal), numpy.zeros(len(equal)))
    assert result.success
    return -float(result.fun) * scale


@given(st.lists(RATES, min_size=1, max_size=10), st.floats(1, 1e9))
@examples(60)
def test_one_switch_has_a_closed_form(bandwidths: list[float], size: float) -> None:
    spec = ClusterSpec.star(bandwidths)
    assert synchronization_time(spec, size) == pytest.approx(one_switch_time(bandwidths, size), rel=1e-5)


@given(random_clusters(max_ranks=4))
@examples(30)
def test_trees_on_one_route_a_pair_reach_what_flows_reach(spec: ClusterSpec) -> None:
    if spec.world_size > 1:
        assert best_packing(LinkGraph(spec)).rate == pytest.approx(flow_bound(spec, all_routes=False), rel=1e-4)


@given(random_clusters(max_ranks=4) | fabrics(max_ranks=4))
@examples(25)
def test_the_bound_is_what_flows_over_all_routes_reach(spec: ClusterSpec) -> None:
    if spec.world_size > 1:
        assert synchronization_rate(spec) == pytest.approx(flow_bound(spec, all_routes=True), rel=1e-4)


@given(random_clusters(max_ranks=4, symmetric=True) | fabrics(max_ranks=4, symmetric=True))
@examples(20)
def test_mirrored_trees_are_enough_on_symmetric_links(spec: ClusterSpec) -> None:
    if spec.world_size > 1:
        assert synchronization_rate(spec) == pytest.approx(flow_bound(spec, all_routes=True), rel=1e-4)


@given(fabrics(max_ranks=6))
@examples(20)
def test_no_method_on_a_fabric_is_faster_than_the_bound(spec: ClusterSpec) -> None:
    least = synchronization_time(spec, MIB) * (1 - 1e-9)
    assert least <= MIB / pack_trees(spec).rate
    assert least <= ring_time(spec, MIB)
    assert all(cut.seconds(MIB) <= least * (1 + 1e-6) for cut in find_cuts(LinkGraph(spec)))


@given(fabrics(max_ranks=5))
@examples(8)
def test_no_builder_on_a_fabric_is_priced_below_the_bound(spec: ClusterSpec) -> None:
    work = Workload(name="w", variables=tuple(Variable(name=f"v{index}", shape=(300_000,)) for index in range(3)))
    least = synchronization_bound(work, spec) * (1 - 1e-6)
    pricing = Replay(work, spec, Constants.ideal())
    for name in builders.names():
        if name in ("shared_memory", "gathered_rows"):
            continue  # one uses no links, the other is for tables
        made = compile_plan(builders.build(name, work, spec), work, spec)
        for detail in ("frames", "fluid"):
            assert pricing.predict(made, detail).synchronization_time >= least, (name, detail)


def test_the_bound_counts_all_routes() -> None:
    """By hand: on one route a pair, the rate is that of one spine, or of one of a node's two links."""
    spines = leaves_and_spines(leaves=2, spines=2, nodes_per_leaf=4, uplink=MB / 2)
    assert best_packing(LinkGraph(spines)).rate == pytest.approx(MB / 2, rel=1e-5)
    assert synchronization_rate(spines) == pytest.approx(8 * MB / 14, rel=1e-5)
    two_links = two_links_a_node(nodes=4)
    assert best_packing(LinkGraph(two_links)).rate == pytest.approx(MB * 4 / 6, rel=1e-5)
    assert synchronization_rate(two_links) == pytest.approx(2 * MB * 4 / 6, rel=1e-5)


@given(random_clusters(max_ranks=7) | fabrics(max_ranks=6), st.floats(0.1, 10))
@examples(20)
def test_bounds_keep_their_laws(spec: ClusterSpec, factor: float) -> None:
    least = synchronization_time(spec, MIB)
    assert least <= ring_time(spec, MIB) * (1 + 1e-5)
    assert synchronization_time(spec, 2 * MIB) == pytest.approx(2 * least)
    assert synchronization_time(spec.scaled(factor), MIB) == pytest.approx(least / factor, rel=1e-5)
    assert ring_time(spec.scaled(factor), MIB) == pytest.approx(ring_time(spec, MIB) / factor)


@given(random_clusters())
@examples(40)
def test_server_shares_are_shares(spec: ClusterSpec) -> None:
    shares = server_shares(spec)
    assert len(shares) == spec.world_size
    assert sum(shares) == pytest.approx(1)
    assert min(shares) >= 0


@given(st.lists(RATES, min_size=3, max_size=8))
@examples(60)
def test_server_shares_reach_the_bound_on_one_switch(bandwidths: list[float]) -> None:
    """A rank sends the shards of others and, to each of the others, its own shard once reduced."""
    shares = numpy.array(server_shares(ClusterSpec.star(bandwidths)))
    sent = (1 - shares) + (len(bandwidths) - 1) * shares
    assert max(sent / bandwidths) == pytest.approx(one_switch_time(bandwidths, 1.0), rel=1e-6)


def test_measured_examples_of_one_switch() -> None:
    megabit = 1e6 / 8
    uneven = [400 * megabit, *[100 * megabit] * 3]
    assert one_switch_time(uneven, 4 * MIB) == pytest.approx(0.3355, rel=1e-3)
    assert ring_time(ClusterSpec.star(uneven), 4 * MIB) == pytest.approx(0.5033, rel=1e-3)
    assert server_shares(ClusterSpec.star(uneven)) == pytest.approx([1, 0, 0, 0])
    assert server_shares(ClusterSpec.star([1e6, 3e6])) == pytest.approx([0.25, 0.75])
    assert server_shares(ClusterSpec.uniform(1, devices=4)) == pytest.approx([0.25] * 4)


def test_links_that_no_route_uses_do_not_raise_a_share() -> None:
    """A node with a second link, which is slower, has the share of one that has only the first."""
    star = ClusterSpec.star([2e8, 1e8, 1e8, 1e8]).to_dict()
    nodes, (switch,) = [node["name"] for node in star["nodes"]], star["switches"]
    spare = {"a": nodes[1], "b": "spare", "bandwidth": 5e7, "latency": 1.0}
    way_on = {"a": "spare", "b": switch, "bandwidth": 5e7, "latency": 1.0}
    more = {**star, "switches": [switch, "spare"], "links": [*star["links"], spare, way_on]}
    assert server_shares(ClusterSpec.from_dict(more)) == pytest.approx(server_shares(ClusterSpec.from_dict(star)))


def test_a_node_with_two_links_has_the_share_that_its_routes_allow() -> None:
    """The first node reaches one of the two other nodes over each of its links, and a third one over the first."""
    names = ["middle", "left", "right", "far"]
    links = [("middle", "left", 1e8), ("middle", "right", 1e8), ("left", "far", 1e8)]
    spec = ClusterSpec.from_dict(
        {
            "format": ClusterSpec.FORMAT,
            "name": "c",
            "nodes": [{"name": name} for name in names],
            "links": [{"a": a, "b": b, "bandwidth": rate} for a, b, rate in links],
        }
    )
    # Two of three routes use the busier link: 1.5e8 bytes/s to three others, for the middle node and the left one.
    ways_out = numpy.array([1.5e8, 1.5e8, 1e8, 1e8])
    weights = numpy.maximum(one_switch_time(ways_out.tolist(), 1.0) * ways_out - 1, 0)
    assert server_shares(spec) == pytest.approx(weights / weights.sum())


def test_two_racks_do_not_care_for_the_order_of_ranks_but_a_ring_does() -> None:
    spec = resolve_cluster("two_racks_2to1")
    mixed = spec.with_rank_order([f"node{4 * (rank % 2) + rank // 2}" for rank in range(8)])
    for order in (spec, mixed):
        assert synchronization_time(order, 12 * MIB) == pytest.approx(0.5033, rel=1e-3)
    assert ring_time(spec, 12 * MIB) == pytest.approx(0.881, rel=1e-3)
    assert ring_time(mixed, 12 * MIB) == pytest.approx(4 * ring_time(spec, 12 * MIB))


def test_a_lopsided_ring_goes_round_where_mirrored_trees_cannot() -> None:
    links = [{"a": f"n{i}", "b": f"n{(i + 1) % 4}", "bandwidth": 1e7, "reverse_bandwidth": 1e8} for i in range(4)]
    nodes = [{"name": f"n{i}"} for i in range(4)]
    spec = ClusterSpec.from_dict({"format": ClusterSpec.FORMAT, "name": "c", "nodes": nodes, "links": links})
    assert synchronization_rate(spec) == pytest.approx(flow_bound(spec, all_routes=True), rel=1e-5)
    assert synchronization_time(spec, MIB) < ring_time(spec, MIB)


def test_one_rank_has_nothing_to_wait_for() -> None:
    spec = ClusterSpec.uniform(1)
    assert synchronization_rate(spec) == math.inf
    assert synchronization_time(spec, MIB) == ring_time(spec, MIB) == one_switch_time([1.0], MIB) == 0
    assert server_shares(spec) == (1.0,)


@pytest.mark.parametrize("bandwidths", [[], [1.0, 0.0]])
def test_wrong_bandwidths_are_refused(bandwidths: list[float]) -> None:
    with pytest.raises(ClusterError, match="bandwidths: expected one rate of more than zero"):
        one_switch_time(bandwidths, 1.0)


def test_bounds_of_a_bare_shape_say_what_is_missing() -> None:
    spec = ClusterSpec.uniform(2, devices=2)
    for bound in (synchronization_rate, server_shares):
        with pytest.raises(ClusterError, match="bandwidth: unknown"):
            bound(spec)
    with pytest.raises(ClusterError, match="bandwidth: unknown"):
        ring_time(spec, MIB)


@pytest.mark.parametrize("name", shipped_clusters())
def test_a_ring_is_never_under_the_bound_of_a_shipped_cluster(name: str) -> None:
    spec = resolve_cluster(name)
    assert 0 < synchronization_time(spec, MIB) <= ring_time(spec, MIB) * (1 + 1e-6)
