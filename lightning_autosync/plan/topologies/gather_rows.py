"""Rows that travel once: every rank sends its touched rows to all others, and each adds them up."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise

from lightning_autosync.cluster import pack_broadcasts
from lightning_autosync.plan.schedule import RowBroadcast, Transfer
from lightning_autosync.plan.spec import Group
from lightning_autosync.plan.topologies import Facts, MessageCut, Method, Site, Topology, register
from lightning_autosync.plan.topologies.base import (
    ALL_REDUCE,
    LARGEST_SEGMENT,
    SMALLEST_SEGMENT,
    cached_tree,
    leaders_and_members,
    make_tree,
)
from lightning_autosync.plan.trees import Tree


class GatherRows(Topology):
    """Trees from every rank, packed into the cluster's links; without known rates, they enter each node once.

    Along trees towards a server, rows travel twice: up, and down with the rows of all other ranks. That is better only
    where ranks touch many rows in common.
    """

    name = "gather_rows"
    label = "rows gathered once"
    hatch = "|||"
    encoded_as = "all_reduce"
    offers = (Method("gather_rows", place=25),)
    architectures = (ALL_REDUCE,)
    rows_only = True
    compresses = False
    segmented = True

    def pays(self, method: Method, facts: Facts, dense: bool) -> bool:
        return not dense and facts.ranks > 1

    def transfers(self, group: Group, cut: MessageCut, site: Site) -> Iterator[Transfer]:
        weights, bundles = _bundles(site)
        for start, stop in cut.spans:
            edges = [start + round((stop - start) * reached) for reached in accumulate(weights, initial=0.0)]
            for trees, (lower, upper) in zip(bundles, pairwise([*edges[:-1], stop]), strict=True):
                if upper > lower:
                    # Trees without a second hop have no pipeline to fill: the fewer frames, the better.
                    least = SMALLEST_SEGMENT if any(tree.depth > 1 for tree in trees) else LARGEST_SEGMENT
                    yield RowBroadcast(lower, upper, trees, max(1, int(group.segment or least) // cut.itemsize))


def _bundles(site: Site) -> tuple[tuple[float, ...], list[tuple[Tree, ...]]]:
    """The share of each bundle of trees, and the bundles, with a tree from each rank."""
    if site.cluster.measured:
        packed = pack_broadcasts(site.cluster)
        return packed.weights, [tuple(map(cached_tree, bundle)) for bundle in packed.bundles]
    trees = []
    for root in range(site.ranks):
        leaders, members = leaders_and_members(site.nodes, root, root)
        trees.append(make_tree({rank: -1 if rank == root else root for rank in leaders} | members))
    return (1.0,), [tuple(trees)]


register(GatherRows())
