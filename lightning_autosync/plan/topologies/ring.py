"""Chains of ranks, as in a ring all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from lightning_autosync.plan.spec import Group
from lightning_autosync.plan.topologies import Facts, Method, Site, TreeTopology, register
from lightning_autosync.plan.topologies.base import leading


class Ring(TreeTopology):
    """Each part goes around the ring once to be summed and once more to be broadcast."""

    name = label = encoded_as = "ring"
    hatch = "///"
    offers = (Method("ring", place=40),)
    aggregates = True

    def pays(self, method: Method, facts: Facts, dense: bool) -> bool:
        return facts.ranks > 2

    def parents(self, site: Site, group: Group, root: int, shard: int) -> tuple[dict[int, int], dict[int, int]]:
        ranks, members = leading(site, group, root, shard)
        return path_towards(ranks, root) | members, path_from(ranks, root) | members


def path_towards(ranks: Sequence[int], root: int) -> dict[int, int]:
    """Parents along the ring ``ranks`` in the chain that ends at ``root``."""
    return dict(pairwise(_rotated(ranks, ranks.index(root) + 1))) | {root: -1}


def path_from(ranks: Sequence[int], root: int) -> dict[int, int]:
    """Parents along the ring ``ranks`` in the chain that starts at ``root``."""
    return {after: rank for rank, after in pairwise(_rotated(ranks, ranks.index(root)))} | {root: -1}


def _rotated(ranks: Sequence[int], start: int) -> list[int]:
    return [ranks[(start + hop) % len(ranks)] for hop in range(len(ranks))]


register(Ring())
