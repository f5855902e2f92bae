from __future__ import annotations

import itertools
import math
from typing import Any

import networkx
import pytest
from cluster_strategies import random_clusters
from hypothesis import given
from sweeps import examples

from lightning_autosync.cluster import ClusterSpec, LinkGraph, resolve_cluster
from lightning_autosync.errors import ClusterError


def path(link_graph: LinkGraph, i: int, j: int) -> list[str]:
    channels = [link_graph.channels[index] for index in link_graph.route(i, j)]
    for channel, following in itertools.pairwise(channels):
        assert channel.target == following.source
    return [channels[0].source, *(channel.target for channel in channels)]


def build(links: list[dict[str, Any]], nodes: str = "abc", switches: str = "") -> LinkGraph:
    fields = {"nodes": [{"name": name} for name in nodes], "switches": list(switches), "links": links}
    return LinkGraph(ClusterSpec.from_dict({"format": ClusterSpec.FORMAT, "name": "c", **fields}))


def test_a_rank_alone_on_its_node_sits_on_it() -> None:
    link_graph = LinkGraph(ClusterSpec.uniform(2, bandwidth=1e8))
    assert path(link_graph, 0, 1) == ["node0", "switch", "node1"]
    assert link_graph.route(0, 0) == ()
    assert link_graph.bandwidth(0, 0) == math.inf


def test_ranks_of_one_node_cross_their_local_channels_only() -> None:
    link_graph = LinkGraph(ClusterSpec.uniform(2, devices=2, bandwidth=1e8))
    assert path(link_graph, 0, 1) == ["rank 0", "node0", "rank 1"]
    assert path(link_graph, 0, 3) == ["rank 0", "node0", "switch", "node1", "rank 3"]
    assert link_graph.bandwidth(0, 1) == 10 * 2**30
    assert link_graph.bandwidth(0, 3) == 1e8


def test_least_latency_goes_before_hops_and_hops_before_bottleneck() -> None:
    near = {"latency": 1e-6}
    detour = build(
        [
            {"a": "a", "b": "b", "bandwidth": 9, "latency": 3e-6},
            {"a": "a", "b": "c", "bandwidth": 1, **near},
            {"a": "c", "b": "b", "bandwidth": 1, **near},
        ]
    )
    assert path(detour, 0, 1) == ["a", "c", "b"]
    assert detour.latency(0, 1) == pytest.approx(2e-6)
    direct = build([{"a": "a", "b": "b", "bandwidth": 1}, {"a": "a", "b": "c", "bandwidth": 9},
                    {"a": "c", "b": "b", "bandwidth": 9}])  # fmt: skip
    assert path(direct, 0, 1) == ["a", "b"]


def test_the_widest_of_equally_short_paths_is_taken_each_way() -> None:
    links = [
        {"a": "a", "b": "s", "bandwidth": 5, "reverse_bandwidth": 1},
        {"a": "s", "b": "b", "bandwidth": 5, "reverse_bandwidth": 1},
        {"a": "a", "b": "t", "bandwidth": 2, "reverse_bandwidth": 2},
        {"a": "t", "b": "b", "bandwidth": 9, "reverse_bandwidth": 9},
    ]
    link_graph = build(links, nodes="ab", switches="st")
    assert path(link_graph, 0, 1) == ["a", "s", "b"]
    assert path(link_graph, 1, 0) == ["b", "t", "a"]
    assert (link_graph.bandwidth(0, 1), link_graph.bandwidth(1, 0)) == (5, 2)
    assert not link_graph.symmetric


def test_among_equal_paths_the_way_back_is_the_way_there() -> None:
    ends = [("a", "s"), ("t", "b"), ("a", "t"), ("s", "b")]
    link_graph = build([{"a": a, "b": b, "bandwidth": 1} for a, b in ends], nodes="ab", switches="st")
    assert path(link_graph, 0, 1) == ["a", "s", "b"]
    assert path(link_graph, 1, 0) == ["b", "s", "a"]


def test_a_rank_out_of_range_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"rank 4: not in 0\.\.3"):
        LinkGraph(resolve_cluster("four_equal")).route(0, 4)


def test_routes_need_no_rates_but_capacities_do() -> None:
    link_graph = LinkGraph(ClusterSpec.uniform(2))
    assert len(link_graph.route(0, 1)) == 2
    with pytest.raises(ClusterError, match="bandwidth: unknown"):
        link_graph.bandwidth(0, 1)


@given(random_clusters())
@examples(60)
def test_routes_are_connected_least_in_latency_then_hops_then_widest(spec: ClusterSpec) -> None:
    link_graph, again = LinkGraph(spec), LinkGraph(spec)
    graph = networkx.DiGraph([(channel.source, channel.target) for channel in link_graph.channels])
    rates = {(channel.source, channel.target): channel for channel in link_graph.channels}
    for i, j in reversed(list(itertools.permutations(range(spec.world_size), 2))):
        places = path(link_graph, i, j)
        ways = []
        for other in networkx.all_simple_paths(graph, places[0], places[-1]):
            channels = [rates[hop] for hop in itertools.pairwise(other)]
            latency = round(sum(channel.latency for channel in channels) * 1e9)
            bottleneck = min(channel.bandwidth or 0.0 for channel in channels)
            ways.append((latency, len(channels), -bottleneck))
        mine = (round(link_graph.latency(i, j) * 1e9), len(link_graph.route(i, j)), -link_graph.bandwidth(i, j))
        assert mine == min(ways)
        assert link_graph.route(i, j) == again.route(i, j)


@given(random_clusters(symmetric=True))
@examples(30)
def test_symmetric_links_have_mirrored_routes(spec: ClusterSpec) -> None:
    link_graph = LinkGraph(spec)
    assert link_graph.symmetric
    for i, j in itertools.combinations(range(spec.world_size), 2):
        assert path(link_graph, i, j) == path(link_graph, j, i)[::-1]
