"""Several spanning trees, in the proportions that use the link graph best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_autosync.cluster import ClusterSpec, pack_trees
from lightning_autosync.plan.messages import weighted_bounds
from lightning_autosync.plan.spec import Group, WeightedTree
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
        _check_interfaces(group.trees or (), site.cluster)
        stated = group.trees or pack_trees(site.cluster).trees
        pairs = [
            (cached_tree(tree.parents, tree.interface), cached_tree(tree.broadcast or tree.parents, tree.interface))
            for tree in stated
        ]
        if root is not None:
            pairs = [(up.rerooted(root), down.rerooted(root)) for up, down in pairs]
        edges = weighted_bounds((stop - start) // unit, len(pairs), [tree.weight for tree in stated])
        for pair, lower, upper in zip(pairs, edges, edges[1:], strict=False):
            yield start + unit * lower, start + unit * upper, *pair


def _check_interfaces(trees: Sequence[WeightedTree], cluster: ClusterSpec) -> None:
    """Raise ``ValueError`` if a tree runs over an interface that a node lacks."""
    for number, tree in enumerate(trees):
        for node in cluster.nodes:
            if tree.interface >= node.interface_count:
                raise ValueError(
                    f"trees[{number}].interface: node '{node.name}' of cluster '{cluster.name}' has no interface "
                    f"{tree.interface}; allowed: 0 to {cluster.interface_count - 1}, which all nodes have; a cluster "
                    "file may list more interfaces of its nodes"
                )


register(PackedTopology())
