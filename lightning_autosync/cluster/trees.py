"""Trees over ranks: candidates for a packing, the cheapest tree under prices, and the choice of a root.

A tree is the frozenset of its edges, each a pair (i, j) of ranks with i < j. A rooted tree is a tuple with the parent
of each rank, -1 at the root.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy
from numpy.typing import NDArray

EdgeTree = frozenset[tuple[int, int]]
Parents = tuple[int, ...]
Groups = Sequence[Sequence[int]]


def tree_of(edges: Iterable[tuple[int, int]]) -> EdgeTree:
    """The tree with these edges, which may have either direction."""
    return frozenset((min(edge), max(edge)) for edge in edges)


def stars(world_size: int) -> Iterator[EdgeTree]:
    """For every rank, the star with this rank as hub."""
    for hub in range(world_size):
        yield tree_of((hub, rank) for rank in range(world_size) if rank != hub)


def chains(world_size: int) -> Iterator[EdgeTree]:
    """For every rank, the chain of all ranks in order that starts there."""
    for start in range(world_size):
        order = [(start + step) % world_size for step in range(world_size)]
        yield tree_of(itertools.pairwise(order))


def hierarchical_trees(hierarchy: Sequence[Groups], world_size: int) -> Iterator[EdgeTree]:
    """For every rank as hub, trees of two or more levels that follow the groupings, the nearest grouping first.

    In each group of the first grouping the ranks are children of a leader. In each group of the next grouping the
    leaders are children of one of them, and so on. The last leaders are children of the hub. Leaders are rotated to
    share the work.
    """
    for depth in range(1, len(hierarchy) + 1):
        for group in hierarchy[0]:
            for place, hub in enumerate(group):
                for turn in range(max(map(len, hierarchy[0]))):
                    yield hierarchical_tree(hierarchy[:depth], world_size, hub, place + turn)


def hierarchical_tree(hierarchy: Sequence[Groups], world_size: int, hub: int, turn: int) -> EdgeTree:
    """One of the `hierarchical_trees`; ``turn`` is the place of each group's leader, modulo the size of the group."""
    edges = []
    leaders = list(range(world_size))
    for groups in hierarchy:
        chosen, below = [], set(leaders)
        for group in groups:
            candidates = [rank for rank in group if rank in below]
            leader = hub if hub in candidates else candidates[turn % len(candidates)]
            edges += [(leader, rank) for rank in candidates if rank != leader]
            chosen.append(leader)
        leaders = chosen
    return tree_of([*edges, *((hub, leader) for leader in leaders if leader != hub)])


def least_tree(cost: NDArray[numpy.float64], start: int) -> EdgeTree:
    """A minimum spanning tree under a symmetric matrix [ranks, ranks] of edge costs, by Prim's algorithm.

    Among equal costs a rank joins at the earliest connected rank, near ``start``, because shallow trees are preferred.
    """
    count = len(cost)
    nearest = numpy.full(count, start)
    best = cost[start].copy()
    outside = numpy.ones(count, dtype=bool)
    outside[start] = False
    edges = []
    for _ in range(count - 1):
        rank = int(numpy.argmin(numpy.where(outside, best, numpy.inf)))
        edges.append((int(nearest[rank]), rank))
        outside[rank] = False
        closer = outside & (cost[rank] < best)
        best[closer] = cost[rank][closer]
        nearest[closer] = rank
    return tree_of(edges)


def least_arborescence(cost: NDArray[numpy.float64], root: int) -> Parents:
    """The cheapest tree with this root, where an arc from parent u to child v costs ``cost[u, v]``.

    Chu-Liu and Edmonds' algorithm: every vertex takes its cheapest parent, and a resulting cycle is contracted.
    """
    count = len(cost)
    masked = cost.copy()
    numpy.fill_diagonal(masked, numpy.inf)
    parents = [int(parent) for parent in masked.argmin(axis=0)]
    parents[root] = -1
    cycle = _find_cycle(parents)
    if not cycle:
        return tuple(parents)

    inside = numpy.array(cycle)
    rest = numpy.array([vertex for vertex in range(count) if vertex not in set(cycle)])
    saved = masked[[parents[vertex] for vertex in cycle], inside]
    entering = masked[numpy.ix_(rest, inside)] - saved
    leaving = masked[numpy.ix_(inside, rest)]
    size = len(rest)
    contracted = numpy.zeros((size + 1, size + 1))
    contracted[:size, :size] = cost[numpy.ix_(rest, rest)]
    contracted[:size, size] = entering.min(axis=1)
    contracted[size, :size] = leaving.min(axis=0)
    inner = least_arborescence(contracted, int(numpy.flatnonzero(rest == root)[0]))

    for index, parent in enumerate(inner[:size]):
        vertex = int(rest[index])
        if parent == size:
            parents[vertex] = int(inside[leaving[:, index].argmin()])
        elif parent >= 0:
            parents[vertex] = int(rest[parent])
    entry = inner[size]
    parents[int(inside[entering[entry].argmin()])] = int(rest[entry])
    return tuple(parents)


def _find_cycle(parents: Sequence[int]) -> list[int]:
    """The vertices of one cycle among the parents; empty if there is none."""
    finished: set[int] = set()
    for start in range(len(parents)):
        path: list[int] = []
        vertex = start
        while vertex >= 0 and vertex not in finished and vertex not in path:
            path.append(vertex)
            vertex = parents[vertex]
        if vertex in path:
            return path[path.index(vertex) :]
        finished.update(path)
    return []


def root_at(tree: EdgeTree, root: int, world_size: int) -> Parents:
    """The tree with ``root`` as its root."""
    neighbours = _neighbours(tree, world_size)
    parents = [-1] * world_size
    frontier = [root]
    while frontier:
        rank = frontier.pop()
        for neighbour in neighbours[rank]:
            if neighbour != parents[rank]:
                parents[neighbour] = rank
                frontier.append(neighbour)
    return tuple(parents)


def height(parents: Parents) -> int:
    """Number of edges on the longest path from the root to a leaf."""
    tallest = 0
    for rank in range(len(parents)):
        steps = 0
        while parents[rank] >= 0:
            rank = parents[rank]
            steps += 1
        tallest = max(tallest, steps)
    return tallest


def centres(tree: EdgeTree, world_size: int) -> tuple[int, ...]:
    """The one or two ranks as whose root the tree is lowest, ascending; found by repeatedly removing leaves."""
    neighbours = [set(around) for around in _neighbours(tree, world_size)]
    left = set(range(world_size))
    while len(left) > 2:
        leaves = [rank for rank in left if len(neighbours[rank]) == 1]
        for leaf in leaves:
            neighbours[neighbours[leaf].pop()].discard(leaf)
            left.discard(leaf)
    return tuple(sorted(left))


def _neighbours(tree: EdgeTree, world_size: int) -> list[list[int]]:
    neighbours: list[list[int]] = [[] for _ in range(world_size)]
    for i, j in sorted(tree):
        neighbours[i].append(j)
        neighbours[j].append(i)
    return neighbours
