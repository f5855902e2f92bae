"""Several spanning trees, in the proportions that use the link graph best."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_autosync.cluster import pack_trees
from lightning_autosync.plan.messages import weighted_bounds
from lightning_autosync.plan.spec import Group
from lightning_autosync.plan.topologies import Facts, Method, Site, TreeTopology, register
from lightning_autosync.plan.topologies.base import cached_tree
from lightning_autosync.plan.trees import Tree


class PackedTopology(TreeTopology):
    """The trees that the group specifies, or trees packed into the cluster's links."""

    name = encoded_as = "packed"
    label = "packed trees"
    hatch = "---"
    offers = (Method("packed", place=70),)
    takes_trees = True

    def pays(self, method: Method, facts: Facts, dense: bool) -> bool:
        return facts.cluster.measured and facts.ranks > 2

    def parents(self, site: Site, group: Group, root: int, shard: int) -> tuple[dict[int, int], dict[int, int]]:
        raise NotImplementedError("`ranges` hangs whole trees from other roots")

    def ranges(
        self, group: Group, shard: int, root: int | None, bounds: tuple[int, int], unit: int, site: Site
    ) -> Iterator[tuple[int, int, Tree, Tree]]:
        start, stop = bounds
        stated = group.trees or pack_trees(site.cluster).trees
        pairs = [(cached_tree(tree.parents), cached_tree(tree.broadcast or tree.parents)) for tree in stated]
        if root is not None:
            pairs = [(up.rerooted(root), down.rerooted(root)) for up, down in pairs]
        edges = weighted_bounds((stop - start) // unit, len(pairs), [tree.weight for tree in stated])
        for pair, lower, upper in zip(pairs, edges, edges[1:], strict=False):
            yield start + unit * lower, start + unit * upper, *pair


register(PackedTopology())
