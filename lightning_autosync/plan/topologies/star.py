"""Trees of depth one, as in parameter servers."""

from __future__ import annotations

from lightning_autosync.plan.spec import Group
from lightning_autosync.plan.topologies import Facts, Method, Site, TreeTopology, register
from lightning_autosync.plan.topologies.base import PARAMETER_SERVER, leading


class Star(TreeTopology):
    """All ranks send to the rank that reduces and receive the sum from it."""

    name = label = encoded_as = "star"
    hatch = "\\\\\\"
    offers = (Method("star", PARAMETER_SERVER, place=20),)
    aggregates = True

    def pays(self, method: Method, facts: Facts, dense: bool) -> bool:
        return facts.ranks > 1

    def parents(self, site: Site, group: Group, root: int, shard: int) -> tuple[dict[int, int], dict[int, int]]:
        ranks, members = leading(site, group, root, shard)
        parents = {rank: -1 if rank == root else root for rank in ranks} | members
        return parents, parents


register(Star())
