"""Complete binary trees."""

from __future__ import annotations

from lightning_autosync.plan.spec import Group
from lightning_autosync.plan.topologies import Facts, Method, Site, TreeTopology, register
from lightning_autosync.plan.topologies.base import leading


class BinaryTree(TreeTopology):
    """A complete binary tree; its number of hops is logarithmic in the number of ranks."""

    name = label = encoded_as = "tree"
    hatch = "xxx"
    offers = (Method("tree", place=50),)
    aggregates = True

    def pays(self, method: Method, facts: Facts, dense: bool) -> bool:
        return facts.ranks > 2

    def parents(self, site: Site, group: Group, root: int, shard: int) -> tuple[dict[int, int], dict[int, int]]:
        ranks, members = leading(site, group, root, shard)
        start = ranks.index(root)
        order = [ranks[(start + hop) % len(ranks)] for hop in range(len(ranks))]
        parents = {rank: order[(place - 1) // 2] if place else -1 for place, rank in enumerate(order)} | members
        return parents, parents


register(BinaryTree())
