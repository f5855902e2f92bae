"""Two levels: first inside each node (or rack of one-device nodes), then between them."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_autosync.plan import codecs
from lightning_autosync.plan.schedule import Transfer, TwoLevelAllReduce
from lightning_autosync.plan.spec import Group
from lightning_autosync.plan.topologies import Facts, MessageCut, Method, Site, TreeTopology, register
from lightning_autosync.plan.topologies.base import ALL_REDUCE, leaders_and_members


class Hierarchical(TreeTopology):
    """Each place sums its ranks' messages at a leader; the leaders exchange along a star."""

    name = encoded_as = "hierarchical"
    label = "hierarchical trees"
    hatch = "+++"
    offers = (Method("hierarchical", place=60),)
    aggregates = True
    two_level = True

    def pays(self, method: Method, facts: Facts, dense: bool) -> bool:
        return facts.levels

    def parents(self, site: Site, group: Group, root: int, shard: int) -> tuple[dict[int, int], dict[int, int]]:
        leaders, members = leaders_and_members(site.places, root, shard)
        parents = {rank: -1 if rank == root else root for rank in leaders} | members
        return parents, parents

    def transfers(self, group: Group, cut: MessageCut, site: Site) -> Iterator[Transfer]:
        if cut.width is None and _in_collectives(group, site):
            yield from (TwoLevelAllReduce(start, stop, site.places) for start, stop in cut.spans)
        else:
            yield from super().transfers(group, cut, site)


def _in_collectives(group: Group, site: Site) -> bool:
    """Whether a group's messages use two-level collectives: these need equal places and plain sums."""
    return (
        site.two_level_collectives
        and group.architecture == ALL_REDUCE
        and codecs.find(group.compressor.kind).sums == "plain"
        and len({len(ranks) for ranks in site.places}) == 1
    )


register(Hierarchical())
