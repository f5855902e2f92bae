"""Two binary trees, each with half of the message.

The algorithm follows Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan"
(2009).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from lightning_autosync.plan.messages import even_bounds
from lightning_autosync.plan.spec import Group
from lightning_autosync.plan.topologies import Facts, Method, Site, TreeTopology, register
from lightning_autosync.plan.topologies.base import leading
from lightning_autosync.plan.trees import Tree

_ANY = -1
"""Stands for no given root: no server reduces the message."""


class DoubleTree(TreeTopology):
    """Inner ranks of one half's tree are leaves in the other, so that every rank sends and receives about the same.

    A message becomes two transfers of logarithmic depth instead of one transfer per rank. This suits small messages
    among many ranks.
    """

    name = "double_tree"
    label = "two trees"
    hatch = "ooo"
    encoded_as = "tree"
    offers = (Method("double_tree"),)
    aggregates = True

    def pays(self, method: Method, facts: Facts, dense: bool) -> bool:
        return facts.ranks > 3

    def parents(self, site: Site, group: Group, root: int, shard: int) -> tuple[dict[int, int], dict[int, int]]:
        """As in `TreeTopology`, but ``shard`` is the half, and with ``root`` `_ANY` each tree has its natural root."""
        ranks, members = leading(site, group, max(root, 0), 0)
        if root == _ANY:
            parents = in_order(ranks, shard)
        else:
            others = [rank for rank in ranks if rank != root]
            parents = {rank: root if parent == -1 else parent for rank, parent in in_order(others, shard).items()}
            parents[root] = -1
        return parents | members, parents | members

    def ranges(
        self, group: Group, shard: int, root: int | None, bounds: tuple[int, int], unit: int, site: Site
    ) -> Iterator[tuple[int, int, Tree, Tree]]:
        start, stop = bounds
        for half, (lower, upper) in enumerate(pairwise(even_bounds(0, (stop - start) // unit, 2))):
            trees = site.pair(self, group, _ANY if root is None else root, half)
            yield start + unit * lower, start + unit * upper, *trees


def in_order(ranks: Sequence[int], half: int) -> dict[int, int]:
    """Parents in a binary tree in which every other rank is a leaf; the other half's tree has the others as leaves.

    Ranks are numbered in order, and those at odd places are leaves. The second tree is the first one mirrored, or
    shifted by one place if the number of ranks is odd.
    """
    count = len(ranks)
    order = list(ranks)
    if half:
        order = order[::-1] if count % 2 == 0 else order[1:] + order[:1]
    made = {order[0]: -1} if order else {}
    for place in range(1, count):
        lowest = place & -place
        above = (place ^ lowest) | (lowest << 1)
        made[order[place]] = order[above if above < count else place ^ lowest]
    return made


register(DoubleTree())
