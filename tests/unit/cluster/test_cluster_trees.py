from __future__ import annotations

import itertools

import networkx
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweeps import examples

from lightning_autosync.cluster.trees import (
    EdgeTree,
    centres,
    chains,
    height,
    hierarchical_trees,
    least_arborescence,
    least_tree,
    root_at,
    stars,
    tree_of,
)


def is_spanning(tree: EdgeTree, world_size: int) -> bool:
    graph = networkx.Graph(list(tree))
    graph.add_nodes_from(range(world_size))
    return networkx.is_tree(graph)


@st.composite
def trees(draw: st.DrawFn) -> tuple[EdgeTree, int]:
    count = draw(st.integers(2, 9))
    return tree_of((draw(st.integers(0, rank - 1)), rank) for rank in range(1, count)), count


@given(st.integers(2, 7), st.data())
@examples(60)
def test_least_arborescence_is_the_cheapest(count: int, data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(0, 6), min_size=count * count, max_size=count * count))
    cost = numpy.array(costs, dtype=float).reshape(count, count)
    root = data.draw(st.integers(0, count - 1))
    parents = least_arborescence(cost, root)
    assert parents[root] == -1
    assert is_spanning(tree_of((rank, parent) for rank, parent in enumerate(parents) if parent >= 0), count)
    graph = networkx.DiGraph()
    graph.add_weighted_edges_from((u, v, cost[u, v]) for u, v in itertools.permutations(range(count), 2) if v != root)
    best = networkx.minimum_spanning_arborescence(graph).size("weight")
    assert sum(cost[parent, rank] for rank, parent in enumerate(parents) if parent >= 0) == pytest.approx(best)


@given(st.integers(2, 8), st.data())
@examples(60)
def test_least_tree_is_the_cheapest(count: int, data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(0, 6), min_size=count * count, max_size=count * count))
    cost = numpy.array(costs, dtype=float).reshape(count, count)
    cost += cost.T
    tree = least_tree(cost, data.draw(st.integers(0, count - 1)))
    graph = networkx.Graph()
    graph.add_weighted_edges_from((i, j, cost[i, j]) for i, j in itertools.combinations(range(count), 2))
    assert is_spanning(tree, count)
    best = networkx.minimum_spanning_tree(graph).size("weight")
    assert sum(cost[edge] for edge in tree) == pytest.approx(best)


def test_equal_costs_make_a_star() -> None:
    assert least_tree(numpy.ones((5, 5)), 2) == list(stars(5))[2]


@given(trees())
@examples()
def test_centres_are_the_roots_of_least_height(tree_and_count: tuple[EdgeTree, int]) -> None:
    tree, count = tree_and_count
    heights = [height(root_at(tree, root, count)) for root in range(count)]
    lowest = tuple(root for root in range(count) if heights[root] == min(heights))
    assert centres(tree, count) == lowest


def test_candidates_span() -> None:
    nodes = tuple((2 * index, 2 * index + 1) for index in range(4))
    racks = ((0, 1, 2, 3), (4, 5, 6, 7))
    for tree in [*stars(8), *chains(8), *hierarchical_trees([nodes, racks], 8)]:
        assert is_spanning(tree, 8)


def test_hierarchical_trees_cross_between_groups_as_seldom_as_can_be() -> None:
    nodes = ((0, 3), (1, 4), (2, 5))
    found = list(hierarchical_trees([nodes], 6))
    assert all(sum(i % 3 != j % 3 for i, j in tree) == 2 for tree in found)
    assert len(set(found)) > 6
