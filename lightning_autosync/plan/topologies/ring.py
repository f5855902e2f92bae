"""Chains of ranks: what the ring all-reduce is made of."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from lightning_autosync.plan.spec import Group
from lightning_autosync.plan.topologies import Facts, Method, Site, TreeTopology, register
from lightning_autosync.plan.topologies.base import leading


class Ring(TreeTopology):
    """Each part goes once around the ring to be summed, and once more to be handed out."""

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
    """Parents on the way round the ring ``ranks`` that ends at ``root``."""
    return dict(pairwise(_rotated(ranks, ranks.index(root) + 1))) | {root: -1}


def path_from(ranks: Sequence[int], root: int) -> dict[int, int]:
    """Parents on the way round the ring ``ranks`` that starts at ``root``."""
    return {after: rank for rank, after in pairwise(_rotated(ranks, ranks.index(root)))} | {root: -1}


def _rotated(ranks: Sequence[int], start: int) -> list[int]:
    return [ranks[(start + hop) % len(ranks)] for hop in range(len(ranks))]


register(Ring())
