from __future__ import annotations

import math
from random import Random

import networkx
import numpy
import pytest
from cluster_strategies import RATES, random_clusters
from clusters import asymmetric_cluster
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csc_array
from sweeps import examples, sweep

from lightning_autosync.cluster import (
    ClusterSpec,
    LinkGraph,
    TreePacking,
    columns,
    one_switch_time,
    pack_trees,
    resolve_cluster,
    shipped_clusters,
    synchronization_rate,
)
from lightning_autosync.cluster import packing as packing_module
from lightning_autosync.cluster.columns import Packing
from lightning_autosync.cluster.packing import _root_trees, best_packing, drop_small
from lightning_autosync.cluster.trees import height, tree_of
from lightning_autosync.errors import ClusterError

MIB = 2.0**20


def check(spec: ClusterSpec, packing: TreePacking) -> None:
    """Every tree spans, the weights are shares, and the fullest channel is exactly full."""
    link_graph = LinkGraph(spec)
    loads = numpy.zeros(len(link_graph.channels))
    for tree in packing.trees:
        assert tree.weight > 0
        broadcast = tree.broadcast or tree.parents
        assert broadcast.index(-1) == tree.parents.index(-1)
        edges = [
            [(rank, parent) for rank, parent in enumerate(way) if parent >= 0] for way in (tree.parents, broadcast)
        ]
        for way, pairs in zip((tree.parents, broadcast), edges, strict=True):
            graph = networkx.Graph(pairs)
            graph.add_nodes_from(range(spec.world_size))
            assert networkx.is_tree(graph)
            assert way.count(-1) == 1
            assert not link_graph.symmetric or height(way) == networkx.radius(graph)
        transfers = [*edges[0], *((parent, rank) for rank, parent in edges[1])]
        (used,) = link_graph.load_rows([transfers], [tree.interface]).toarray()
        loads += tree.weight * packing.rate * used
    assert not link_graph.symmetric or all(tree.broadcast is None for tree in packing.trees)
    assert sum(tree.weight for tree in packing.trees) == pytest.approx(1)
    assert max(loads / link_graph.capacities) == pytest.approx(1)


@given(random_clusters(max_ranks=8))
@examples(25)
def test_packings_fit_span_and_come_near_the_best(spec: ClusterSpec) -> None:
    if spec.world_size == 1:
        return
    packing = pack_trees(spec)
    check(spec, packing)
    assert packing.rate >= 0.98 * (1 - 1e-5) * best_packing(LinkGraph(spec)).rate
    assert packing.rate <= (1 + 1e-5) * synchronization_rate(spec)


@pytest.mark.parametrize("shape", sweep(["ring", "mesh", "star", "racks"], ["ring", "star", "racks"]))
def test_pairs_of_trees_reach_the_bound_of_asymmetric_links(shape: str) -> None:
    paired = 0
    for seed in range(6):
        random = Random(seed)
        spec = asymmetric_cluster(shape, random.randint(3, 8), random)
        packing = pack_trees(spec)
        check(spec, packing)
        assert 0.98 <= packing.rate / synchronization_rate(spec) < 1 + 1e-5
        paired += any(tree.broadcast for tree in packing.trees)
    assert paired


def test_pairs_can_be_left_out() -> None:
    spec = asymmetric_cluster("mesh", 4, Random(3))
    packing = pack_trees(spec, pairs=False)
    check(spec, packing)
    assert all(tree.broadcast is None for tree in packing.trees)
    assert 1.5 * packing.rate < pack_trees(spec).rate


def test_large_clusters_pack_single_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_module, "EXACT_RANKS", 4)
    spec = asymmetric_cluster("mesh", 5, Random(0))
    pack_trees.cache_clear()
    assert all(tree.broadcast is None for tree in pack_trees(spec).trees)
    pack_trees.cache_clear()


@given(st.lists(RATES, min_size=2, max_size=8))
@examples(30)
def test_one_switch_packs_stars_to_the_bound(bandwidths: list[float]) -> None:
    packing = pack_trees(ClusterSpec.star(bandwidths))
    assert packing.rate == pytest.approx(1 / one_switch_time(bandwidths, 1.0), rel=0.02)
    assert all(height(tree.parents) == 1 for tree in packing.trees)


@pytest.mark.parametrize("name", shipped_clusters())
def test_shipped_clusters_pack_in_few_programs_and_near_the_bound(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = resolve_cluster(name)
    pack_trees.cache_clear()
    sizes: list[int] = []
    solve = columns._optimize

    def count(costs: numpy.ndarray, rows: object, limits: object) -> object:
        sizes.append(len(costs))
        return solve(costs, rows, limits)

    monkeypatch.setattr(columns, "_optimize", count)
    packing = pack_trees(spec)
    assert len(sizes) <= 4
    assert max(sizes) <= 8 * spec.world_size
    check(spec, packing)
    assert packing.rate >= 0.98 * synchronization_rate(spec)
    pack_trees.cache_clear()
    assert pack_trees(spec) == packing


@pytest.mark.parametrize("interleaved", [False, True])
def test_two_racks_in_either_order_of_ranks(interleaved: bool) -> None:
    spec = resolve_cluster("two_racks_2to1")
    if interleaved:
        spec = spec.with_rank_order([f"node{4 * (rank % 2) + rank // 2}" for rank in range(8)])
    packing = pack_trees(spec)
    assert 12 * MIB / packing.rate == pytest.approx(0.503, rel=0.02)
    assert max(height(tree.parents) for tree in packing.trees) == 2


def test_equal_nodes_root_equal_shares() -> None:
    packing = pack_trees(resolve_cluster("four_equal"))
    assert sorted(tree.parents.index(-1) for tree in packing.trees) == [0, 1, 2, 3]
    assert [tree.weight for tree in packing.trees] == pytest.approx([0.25] * 4, rel=1e-3)


def test_racks_of_nodes_with_devices_get_trees_of_three_levels() -> None:
    spec = ClusterSpec.racks(4, 4, bandwidth="1 Gbit/s", uplink="500 Mbit/s", devices=2)
    packing = pack_trees(spec)
    check(spec, packing)
    assert packing.rate >= 0.98 * synchronization_rate(spec)
    assert max(height(tree.parents) for tree in packing.trees) <= 4


def test_roots_are_spread_over_equal_centres() -> None:
    trees = [(tree_of([(0, 1), (1, 2), (2, 3)]), 0), (tree_of([(3, 1), (1, 2), (2, 0)]), 1)]
    packed = _root_trees(trees, numpy.array([0.4, 0.6]), world_size=4)
    assert [tree.parents.index(-1) for tree in packed] == [1, 2]
    assert [tree.weight for tree in packed] == [0.6, 0.4]
    assert [tree.interface for tree in packed] == [1, 0]


def test_small_trees_are_dropped_only_where_that_costs_little() -> None:
    """One tree fills channel 0; small ones on channel 1 carry, in all, a hundredth or a tenth beside it."""
    for count, kept in ((3, 1), (25, 26)):
        weights = numpy.array([1.0 - 0.004 * count, *[0.004] * count])
        loads = numpy.vstack([weights == weights.max(), weights != weights.max()]).astype(float)
        trees = tuple(frozenset({(0, index + 1)}) for index in range(count + 1))
        capacities = loads @ weights
        rate, shares = drop_small(weights, Packing(1.0, trees, csc_array(loads), numpy.zeros(2)), capacities, 0.98)
        assert numpy.count_nonzero(shares) == kept
        assert shares.sum() == pytest.approx(1)
        assert rate >= 0.98


def test_one_rank_is_its_own_tree() -> None:
    packing = pack_trees(ClusterSpec.uniform(1))
    assert packing.rate == math.inf
    assert [(tree.weight, tree.parents) for tree in packing.trees] == [(1.0, (-1,))]


def test_a_bare_shape_cannot_be_packed() -> None:
    with pytest.raises(ClusterError, match="bandwidth: unknown"):
        pack_trees(ClusterSpec.uniform(4))
