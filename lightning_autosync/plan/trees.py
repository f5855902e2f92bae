"""Spanning trees over ranks, along which shards are reduced and broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


def check_parents(parents: Sequence[int]) -> None:
    """Check that ``parents`` is one rooted tree over all ranks.

    Raises:
        ValueError: no root, several roots, a parent out of range, or a cycle.
    """
    roots = [rank for rank, parent in enumerate(parents) if parent < 0]
    if len(roots) != 1:
        raise ValueError(f"a tree has one root (parent -1), got {len(roots)}")
    for rank, parent in enumerate(parents):
        if parent >= len(parents):
            raise ValueError(f"parent {parent} of rank {rank} is out of range; the tree has {len(parents)} ranks")
    reaches_root = {roots[0]}
    for rank in range(len(parents)):
        path: set[int] = set()
        walker = rank
        while walker not in reaches_root:
            if walker in path:
                raise ValueError(f"the tree has a cycle through rank {walker}")
            path.add(walker)
            walker = parents[walker]
        reaches_root |= path


@dataclass(frozen=True)
class Tree:
    """A rooted spanning tree; ``parents[rank]`` is -1 at the root. Data flows up in a reduce, down in a broadcast.

    Its ranks are connected over the same ``interface`` of each node, 0 for the first.
    """

    parents: tuple[int, ...]
    interface: int = 0

    def __post_init__(self) -> None:
        check_parents(self.parents)

    @property
    def size(self) -> int:
        return len(self.parents)

    @cached_property
    def root(self) -> int:
        return self.parents.index(-1)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """[ranks] children of each rank, ascending, which is the order in which contributions are summed."""
        lists: list[list[int]] = [[] for _ in self.parents]
        for rank, parent in enumerate(self.parents):
            if parent >= 0:
                lists[parent].append(rank)
        return tuple(tuple(ranks) for ranks in lists)

    @property
    def depth(self) -> int:
        """Largest number of hops from the root to a rank."""
        return self.heights[self.root]

    @cached_property
    def heights(self) -> tuple[int, ...]:
        """[ranks] largest number of hops from each rank to a rank below it."""
        heights = [0] * self.size
        for rank in self.upwards:
            if (parent := self.parents[rank]) >= 0:
                heights[parent] = max(heights[parent], heights[rank] + 1)
        return tuple(heights)

    @cached_property
    def upwards(self) -> tuple[int, ...]:
        """All ranks, each before its parent."""
        order = [self.root]
        for rank in order:
            order += self.children[rank]
        return tuple(reversed(order))

    def rerooted(self, root: int) -> Tree:
        """The same undirected tree with another root."""
        parents = list(self.parents)
        rank, parent = root, -1
        while rank >= 0:
            parents[rank], rank, parent = parent, parents[rank], rank
        return Tree(tuple(parents), self.interface)
