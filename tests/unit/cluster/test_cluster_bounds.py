from __future__ import annotations

import itertools
import math

import numpy
import pytest
from cluster_strategies import RATES, random_clusters
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from lightning_autosync.cluster import (
    ClusterSpec,
    LinkGraph,
    one_switch_time,
    resolve_cluster,
    ring_time,
    server_shares,
    shipped_clusters,
    synchronization_rate,
    synchronization_time,
)
from lightning_autosync.errors import ClusterError

MIB = 2.0**20


def flow_bound(spec: ClusterSpec) -> float:
    """The same optimum from arcs and flows instead of trees: arc capacities for each root and direction,
    and inside them a flow of the root's rate to (or from) every other rank."""
    link_graph = LinkGraph(spec)
    count = spec.world_size
    arcs = list(itertools.permutations(range(count), 2))
    flows = [(r, way, v) for r in range(count) for way in (0, 1) for v in range(count) if v != r]
    rates = {r: r for r in range(count)}
    capacity = {key: count + k for k, key in enumerate(itertools.product(range(count), (0, 1), arcs))}
    start = count + len(capacity)
    flow = {key: start + k for k, key in enumerate(itertools.product(flows, arcs))}
    size = start + len(flow)
    above, equal = [], []
    for key, arc in flow:
        row = numpy.zeros(size)
        row[flow[key, arc]], row[capacity[key[0], key[1], arc]] = 1, -1
        above.append(row)
    for channel in range(len(link_graph.channels)):
        row = numpy.zeros(size)
        for (_, _, arc), column in capacity.items():
            row[column] = link_graph.route(*arc).count(channel)
        above.append(row / link_graph.capacities[channel] * link_graph.capacities.min())
    for r, way, v in flows:
        for place in range(count):
            row = numpy.zeros(size)
            for i, j in arcs:
                row[flow[(r, way, v), (i, j)]] = (i == place) - (j == place)
            row[rates[r]] = ((place == v) - (place == r)) * (1 if way == 0 else -1)
            equal.append(row)
    limits = numpy.append(numpy.zeros(len(flow)), numpy.ones(len(link_graph.channels)))
    goal = numpy.append(-numpy.ones(count), numpy.zeros(size - count))
    result = linprog(goal, numpy.array(above), limits, numpy.array(equal), numpy.zeros(len(equal)))
    assert result.success
    return -float(result.fun) * float(link_graph.capacities.min())


@given(st.lists(RATES, min_size=1, max_size=10), st.floats(1, 1e9))
@settings(max_examples=60, deadline=None)
def test_one_switch_has_a_closed_form(bandwidths: list[float], size: float) -> None:
    spec = ClusterSpec.star(bandwidths)
    assert synchronization_time(spec, size) == pytest.approx(one_switch_time(bandwidths, size), rel=1e-5)


@given(random_clusters(max_ranks=4))
@settings(max_examples=40, deadline=None)
def test_trees_reach_what_flows_reach(spec: ClusterSpec) -> None:
    if spec.world_size > 1:
        assert synchronization_rate(spec) == pytest.approx(flow_bound(spec), rel=1e-4)


@given(random_clusters(max_ranks=4, symmetric=True))
@settings(max_examples=20, deadline=None)
def test_mirrored_trees_are_enough_on_symmetric_links(spec: ClusterSpec) -> None:
    if spec.world_size > 1:
        assert synchronization_rate(spec) == pytest.approx(flow_bound(spec), rel=1e-4)


@given(random_clusters(max_ranks=7), st.floats(0.1, 10))
@settings(max_examples=40, deadline=None)
def test_bounds_keep_their_laws(spec: ClusterSpec, factor: float) -> None:
    least = synchronization_time(spec, MIB)
    assert least <= ring_time(spec, MIB) * (1 + 1e-5)
    assert synchronization_time(spec, 2 * MIB) == pytest.approx(2 * least)
    assert synchronization_time(spec.scaled(factor), MIB) == pytest.approx(least / factor, rel=1e-5)
    assert ring_time(spec.scaled(factor), MIB) == pytest.approx(ring_time(spec, MIB) / factor)


@given(random_clusters())
@settings(max_examples=40, deadline=None)
def test_server_shares_are_shares(spec: ClusterSpec) -> None:
    shares = server_shares(spec)
    assert len(shares) == spec.world_size
    assert sum(shares) == pytest.approx(1)
    assert min(shares) >= 0


@given(st.lists(RATES, min_size=3, max_size=8))
@settings(max_examples=60, deadline=None)
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
    assert synchronization_rate(spec) == pytest.approx(flow_bound(spec), rel=1e-5)
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
