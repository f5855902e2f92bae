"""Broadcasts of all ranks at once: trees from each rank, and the rate that they reach."""

from __future__ import annotations

from random import Random

import numpy
import pytest
from cluster_strategies import random_clusters
from clusters import asymmetric_cluster, shared_nodes
from hypothesis import given
from max_flows import shard_rate
from sweeps import examples

from lightning_autosync.cluster import BroadcastPacking, ClusterSpec, LinkGraph, pack_broadcasts, resolve_cluster
from lightning_autosync.cluster import broadcasts as module
from lightning_autosync.plan import Tree


def check(spec: ClusterSpec, packing: BroadcastPacking) -> None:
    """Every bundle has a spanning tree from each rank, the weights are shares, and the fullest channel is full."""
    link_graph = LinkGraph(spec)
    loads = numpy.zeros(len(link_graph.channels))
    assert sum(packing.weights) == pytest.approx(1.0)
    for weight, bundle in zip(packing.weights, packing.bundles, strict=True):
        assert [Tree(parents).root for parents in bundle] == list(range(spec.world_size))
        for parents in bundle:
            loads += weight * link_graph.loads([(parent, rank) for rank, parent in enumerate(parents) if parent >= 0])
    if spec.world_size > 1:
        assert (packing.rate * loads / link_graph.capacities).max() == pytest.approx(1.0)


@examples(25)
@given(spec=random_clusters())
def test_trees_span_and_fill_the_links(spec: ClusterSpec) -> None:
    check(spec, pack_broadcasts(spec))


@pytest.mark.parametrize(
    ("bandwidths", "latency", "hub"),
    [
        ([1e7] * 4, 0.0, None),
        ([3.5e7, 1e7, 1e7, 1e7], 0.0, 0),  # one leaf's own rows and those of the others: 3e7 bytes/s
        ([1e7, 1e7, 4e7, 1e7], 50e-6, 2),
        ([2e7, 1e7, 1e7, 1e7], 0.0, None),
        ([4e7, 1e7, 1e7, 1e7], 5e-3, None),
        ([4e9, 1e9, 1e9, 1e9], 0.0, None),
    ],
    ids=["equal", "just enough", "another rank", "too slow", "far away", "too fast for one thread"],
)
def test_on_one_switch_rows_travel_over_a_hub_only_if_its_link_carries_them(
    bandwidths: list[float], latency: float, hub: int | None
) -> None:
    spec = ClusterSpec.star(bandwidths=bandwidths, latency=latency)
    packing = pack_broadcasts(spec)
    assert packing.bundles == (module.direct_bundle(4) if hub is None else module.hub_bundle(4, hub),)
    assert packing.rate == pytest.approx(min(bandwidths) / 3, rel=0.03)  # a slow leaf receives from three others
    check(spec, packing)


def test_rows_enter_a_node_of_two_ranks_once() -> None:
    packing = pack_broadcasts(shared_nodes(4))
    # The link of a node brings the rows of two ranks; sent to each rank by itself, they would come twice.
    assert packing.rate == pytest.approx(1e7 / 2, rel=0.031)


def test_rows_enter_a_rack_about_once() -> None:
    spec = resolve_cluster("two_racks_8to1")
    direct = min(LinkGraph(spec).capacities) / 16
    assert pack_broadcasts(spec).rate >= 3.8 * direct


@pytest.mark.parametrize("shape", ["ring", "mesh", "star", "racks"])
def test_generated_bundles_come_near_the_optimum_where_directions_differ(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = asymmetric_cluster(shape, 5, Random(2))
    found = pack_broadcasts.__wrapped__(spec)
    check(spec, found)
    link_graph = LinkGraph(spec)
    links = [(one.source, one.target, one.bandwidth or 0.0) for one in link_graph.channels]
    best = shard_rate(links, link_graph.ends)
    assert 0.96 * best <= found.rate <= best * (1 + 1e-6)
    monkeypatch.setattr(module, "MOST_RANKS", 4)
    given = pack_broadcasts.__wrapped__(spec)
    check(spec, given)
    assert given.rate < 0.9 * found.rate


@pytest.mark.slow
def test_hundreds_of_ranks_broadcast_through_each_uplink_about_once() -> None:
    spec = ClusterSpec.racks(racks=4, nodes_per_rack=64, bandwidth=1e9, uplink=0.5e9)
    packing = pack_broadcasts.__wrapped__(spec)
    assert packing.rate >= 0.95 * 0.5e9 / (256 - 64)  # an uplink brings the rows of the other racks once
    for bundle in packing.bundles:
        assert [parents.index(-1) for parents in bundle] == list(range(256))


def test_one_rank_sends_nothing() -> None:
    assert pack_broadcasts(ClusterSpec.uniform(1, bandwidth=1e6)).bundles == (((-1,),),)


@pytest.mark.parametrize("name", ["two_nodes_of_four", "two_racks_8to1"])
def test_one_bundle_is_enough_where_it_reaches_the_rate(name: str) -> None:
    """With more, each rank would send several frames in place of one, and no link would carry less."""
    spec = resolve_cluster(name)
    packing = pack_broadcasts(spec)
    check(spec, packing)
    assert packing.weights == (1.0,)
