"""Trees with two roots, which exchange their sums: where a plan has them, and that they shorten the longest way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweeps import examples

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan import Compressor, Tree, TreeTransfer, builders, compile_plan
from lightning_autosync.plan.second_roots import LEAST_GAIN, MOST_RANKS, second_root
from lightning_autosync.workload import Variable, Workload

WORKLOAD = Workload(name="one", variables=(Variable(name="weight", shape=(2**18,)),))
RACKS = ClusterSpec.racks(racks=2, nodes_per_rack=4, bandwidth=1e8, uplink=2e7)
SITES = {
    "format": ClusterSpec.FORMAT,
    "name": "sites",
    "nodes": [{"name": name} for name in "abcdef"],
    "switches": ["here", "there"],
    "links": [
        *({"a": name, "b": "here", "bandwidth": 1e8, "latency": 1e-4} for name in "abcd"),
        *({"a": name, "b": "there", "bandwidth": 1e8, "latency": 1e-4} for name in "ef"),
        {"a": "here", "b": "there", "bandwidth": 1e8, "latency": 2e-2},
    ],
}


def transfers(cluster: ClusterSpec, builder: str = "packed_trees", **fields) -> list[TreeTransfer]:
    plan = builders.build(builder, WORKLOAD, cluster)
    groups = tuple(group.model_copy(update=fields) for group in plan.groups)
    return list(
        compile_plan(plan.model_copy(update={"groups": groups}), WORKLOAD, cluster).messages[0].rounds[0].transfers
    )


def longest_way(tree: Tree, second: int = -1) -> int:
    """Hops until all ranks have the sum, if each takes as long; by stepping through them."""
    has = [frozenset({rank}) for rank in range(tree.size)]
    # What each rank sends: its subtree's sum to its parent, and at a root what the other root lacks.
    roots = {tree.root, *([second] if second >= 0 else [])}
    subtree = {}
    for rank in range(tree.size):
        below = [rank]
        for one in below:
            below += [child for child in tree.children[one] if child not in roots]
        subtree[rank] = frozenset(below)
    hops = 0
    while any(len(each) < tree.size for each in has):
        hops += 1
        now = list(has)
        for rank, parent in enumerate(tree.parents):
            if parent < 0:
                continue
            there, back = (rank, parent), (parent, rank)
            for source, target in (there, back):
                between_roots = {source, target} == roots and second >= 0
                full = subtree[source] if between_roots or (source, target) == there else frozenset(range(tree.size))
                if full <= now[source]:
                    has[target] |= full
    return hops


def test_roots_on_both_sides_of_the_slowest_hop() -> None:
    for builder in ("packed_trees", "hierarchical"):
        found = transfers(RACKS, builder)
        assert found
        for each in found:
            assert each.root // 4 != each.second_root // 4


def test_latencies_count_not_hops() -> None:
    """A chain inside a site is the deepest subtree, but the way between sites takes longest."""
    cluster = ClusterSpec.from_dict(SITES)
    tree = Tree((-1, 0, 1, 2, 0, 4))
    assert second_root(cluster, tree, tree) == 4
    assert second_root(ClusterSpec.uniform(6, bandwidth=1e8), tree, tree) == 1


@pytest.mark.parametrize(
    ("cluster", "builder", "fields"),
    [
        (ClusterSpec.uniform(4, bandwidth=1e8), "byteps", {}),
        (RACKS, "packed_trees", {"compressor": Compressor(kind="fp16")}),
    ],
    ids=["no way becomes shorter", "both roots would encode"],
)
def test_one_root_is_enough(cluster: ClusterSpec, builder: str, fields: dict[str, object]) -> None:
    assert {each.second_root for each in transfers(cluster, builder, **fields)} == {-1}


def test_many_ranks_have_one_root() -> None:
    for ranks, expected in ((MOST_RANKS, 0), (MOST_RANKS + 1, -1)):
        # Two stars, whose centres are the first and the last rank.
        half = ranks // 2
        tree = Tree((-1, *[0] * (half - 1), *[ranks - 1] * (ranks - half - 1), 0))
        found = second_root(ClusterSpec.uniform(ranks, bandwidth=None), tree, tree)
        assert found == (ranks - 1 if expected == 0 else -1)


@examples(200)
@given(st.data())
def test_the_best_child_is_taken(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(2, 9))
    order = data.draw(st.permutations(range(ranks)))
    parents = [-1] * ranks
    for place in range(1, ranks):
        parents[order[place]] = order[data.draw(st.integers(0, place - 1))]
    tree = Tree(tuple(parents))
    found = second_root(ClusterSpec.uniform(ranks, bandwidth=None), tree, tree)
    one = longest_way(tree)
    ways = {child: longest_way(tree, child) for child in tree.children[tree.root]}
    if min(ways.values()) <= (1 - LEAST_GAIN) * one:
        assert ways[found] == min(ways.values())
    else:
        assert found == -1


def test_a_second_root_is_a_child_of_the_root_on_both_trees() -> None:
    up, down = Tree((-1, 0, 1)), Tree((-1, 2, 0))
    TreeTransfer(0, 4, up, up, 4, second_root=1)
    for trees, second in (((up, up), 2), ((up, up), 0), ((up, down), 1), ((up, down), 2)):
        with pytest.raises(ValueError, match=f"second root {second}"):
            TreeTransfer(0, 4, *trees, 4, second_root=second)
