"""Packing by classes of alike ranks: beside the program over all pairs of ranks, and beyond its size."""

from __future__ import annotations

from random import Random

import networkx
import numpy
import pytest
from cluster_strategies import alike_clusters, random_clusters
from clusters import asymmetric_cluster
from hypothesis import given
from hypothesis import strategies as st
from sweeps import examples

from lightning_autosync.cluster import ClusterSpec, LinkGraph, pack_trees, synchronization_limit
from lightning_autosync.cluster import packing as packing_module
from lightning_autosync.cluster.classes import rank_classes
from lightning_autosync.cluster.packing import best_packing, mirrored_packing
from lightning_autosync.cluster.sketches import class_prices, edge_counts, sketch_packing
from lightning_autosync.cluster.spreading import spread_trees
from lightning_autosync.cluster.trees import height

MB = 1e6


def uneven_racks(nodes: int, devices: int = 1) -> ClusterSpec:
    """Four racks of ``nodes`` at 50 MB/s, whose uplinks differ and, but for one, are too narrow."""
    data = ClusterSpec.racks(4, nodes, bandwidth=50 * MB, uplink=50 * MB, devices=devices).to_dict()
    for link, rate in zip(data["links"][-4:], (40, 20, 20, 10), strict=True):
        link["bandwidth"] = rate * MB
    return ClusterSpec.from_dict(data)


def random_tree(random: Random, ranks: int) -> list[tuple[int, int]]:
    order = random.sample(range(ranks), ranks)
    return [(order[random.randrange(place)], order[place]) for place in range(1, ranks)]


@given(st.one_of(alike_clusters(), random_clusters(max_ranks=8)))
@examples(40)
def test_the_program_on_classes_has_the_rate_of_the_full_one(spec: ClusterSpec) -> None:
    link_graph = LinkGraph(spec)
    if spec.world_size > 1 and (classes := rank_classes(link_graph)):
        assert sketch_packing(classes).rate == pytest.approx(mirrored_packing(link_graph).rate, rel=1e-5)


@given(alike_clusters(), st.randoms(use_true_random=False))
@examples(20)
def test_prices_of_classes_prove_the_bound(spec: ClusterSpec, random: Random) -> None:
    link_graph = LinkGraph(spec)
    prices = class_prices(link_graph)
    if prices is None:
        assert not link_graph.symmetric
        return
    assert link_graph.capacities @ prices == pytest.approx(best_packing(link_graph).rate, rel=1e-5)
    for _ in range(20):
        edges = random_tree(random, spec.world_size)
        assert link_graph.loads([*edges, *((j, i) for i, j in edges)]) @ prices >= 1 - 1e-5


@given(alike_clusters(), st.integers(1, 40), st.randoms(use_true_random=False))
@examples(20)
def test_spread_trees_span_and_follow_their_sketches(spec: ClusterSpec, turns: int, random: Random) -> None:
    classes = rank_classes(LinkGraph(spec))
    assert classes
    sketches = [random.choice(sketch_packing(classes).columns) for _ in range(turns)]
    for sketch, tree in zip(sketches, spread_trees(classes, [(one, 1 / turns) for one in sketches]), strict=True):
        graph = networkx.Graph(list(tree))
        assert sorted(graph) == list(range(spec.world_size))
        assert networkx.is_tree(graph)
        loads = classes.loads(numpy.array(sorted(tree)))
        assert loads == pytest.approx(classes.link_graph.loads([*tree, *((j, i) for i, j in tree)]))
        of_orbits = numpy.bincount(classes.orbit, loads)
        assert of_orbits == pytest.approx(edge_counts(sketch, classes) @ classes.rows)


@given(alike_clusters())
@examples(20)
def test_packings_of_classes_reach_the_rate_and_respect_capacities(spec: ClusterSpec) -> None:
    link_graph = LinkGraph(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing_module, "EXACT_RANKS", 1)
        packing = pack_trees.__wrapped__(spec)
    loads = numpy.zeros(len(link_graph.channels))
    for tree in packing.trees:
        edges = [(rank, parent) for rank, parent in enumerate(tree.parents) if parent >= 0]
        loads += tree.weight * packing.rate * link_graph.loads([*edges, *((j, i) for i, j in edges)])
    assert sum(tree.weight for tree in packing.trees) == pytest.approx(1)
    assert max(loads / link_graph.capacities) == pytest.approx(1)
    assert packing.rate >= 0.98 * mirrored_packing(link_graph).rate * (1 - 1e-5)


@pytest.mark.parametrize(("nodes", "devices"), [(64, 1), (9, 8)])
def test_hundreds_of_ranks_pack_near_an_exact_bound_in_few_shallow_trees(nodes: int, devices: int) -> None:
    """The racks alone make a switch with links of 40, 20, 20 and 10 MB/s."""
    spec = uneven_racks(nodes, devices)
    limit = synchronization_limit(spec)
    assert limit.exact
    assert limit.rate == pytest.approx(10 * MB, rel=1e-5)
    packing = pack_trees(spec)
    assert packing.rate >= 0.98 * limit.rate
    assert len(packing.trees) <= 64
    assert max(height(tree.parents) for tree in packing.trees) <= 8


def test_clusters_without_classes_keep_the_cut_bound() -> None:
    data = ClusterSpec.racks(2, 40, bandwidth=50 * MB, uplink=500 * MB).to_dict()
    for number, link in enumerate(data["links"]):
        link["bandwidth"] += number
    spec = ClusterSpec.from_dict(data)
    assert rank_classes(LinkGraph(spec)) is None
    assert not synchronization_limit(spec).exact


def test_asymmetric_links_and_several_routes_have_no_prices_of_classes() -> None:
    """Pairs of trees and other routes may be faster than what the prices say."""
    for shape in ("star", "ring"):
        spec = asymmetric_cluster(shape, 5, Random(0))
        assert class_prices(LinkGraph(spec)) is None
    ring = asymmetric_cluster("ring", 5, Random(0)).to_dict()
    ring["links"] = [{**link, "reverse_bandwidth": link["bandwidth"]} for link in ring["links"]]
    assert class_prices(LinkGraph(ClusterSpec.from_dict(ring))) is None


def two_spines(rank_order: list[str] | None) -> ClusterSpec:
    """Two leaves with two nodes each, both linked to both spines: two equal routes between leaves."""
    links = [{"a": f"n{index}", "b": f"leaf{index // 2}", "bandwidth": MB} for index in range(4)]
    links += [{"a": f"leaf{leaf}", "b": f"spine{spine}", "bandwidth": MB} for leaf, spine in ((0, 0), (0, 1))]
    links += [{"a": "spine1", "b": "leaf1", "bandwidth": MB}, {"a": "spine0", "b": "leaf1", "bandwidth": MB}]
    fields = {"nodes": [{"name": f"n{index}"} for index in range(4)], "links": links, "rank_order": rank_order}
    switches = ["leaf0", "leaf1", "spine0", "spine1"]
    return ClusterSpec.from_dict({"format": ClusterSpec.FORMAT, "name": "spines", "switches": switches, **fields})


def test_there_are_no_classes_where_the_order_of_ranks_decides_on_routes() -> None:
    assert rank_classes(LinkGraph(two_spines(None))) is not None
    assert rank_classes(LinkGraph(two_spines(["n0", "n2", "n1", "n3"]))) is None
