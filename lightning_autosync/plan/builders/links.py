"""Builders that look at sparsity or at the link graph."""

from __future__ import annotations

from lightning_autosync.cluster import ClusterSpec, pack_trees
from lightning_autosync.documents import Count
from lightning_autosync.plan.builders.grouping import MIB, fused_groups, in_ready_order, make_plan
from lightning_autosync.plan.builders.parameter_server import ps_load_balancing
from lightning_autosync.plan.builders.registry import register
from lightning_autosync.plan.spec import SyncPlan, TopologyName, WeightedTree
from lightning_autosync.workload import Workload


@register()
def parallax(
    workload: Workload,
    cluster: ClusterSpec,
    *,
    topology: TopologyName | None = None,
    bucket_bytes: Count = 25 * MIB,
) -> SyncPlan:
    """Parallax (EuroSys 2019): dense variables by fused all-reduce, row-wise ones by balanced parameter servers.

    ``topology`` None takes ``native`` for the dense and ``star`` for the row-wise ones.
    """
    served = ps_load_balancing(workload, cluster, topology=topology or "star")
    row_wise = {variable.name for variable in workload.variables if variable.kind != "dense"}
    groups = [group for group in served.groups if group.name in row_wise]
    dense = [variable for variable in in_ready_order(workload) if variable.kind == "dense"]
    groups += fused_groups(dense, [bucket_bytes], "bucket", topology=topology or "native")
    return make_plan(workload, cluster, groups)


@register()
def hierarchical(
    workload: Workload,
    cluster: ClusterSpec,
    *,
    topology: TopologyName = "hierarchical",
    bucket_bytes: Count = 25 * MIB,
) -> SyncPlan:
    """Fused all-reduce in two levels: inside a node (or a rack of one-device nodes) first, then between them.

    With ``ring``, ``tree`` or ``star`` the leaders of the nodes use that shape after local aggregation.
    """
    local = topology in ("ring", "tree", "star")
    groups = fused_groups(
        in_ready_order(workload), [bucket_bytes], "bucket", topology=topology, local_aggregation=local
    )
    return make_plan(workload, cluster, groups)


@register()
def packed_trees(
    workload: Workload,
    cluster: ClusterSpec,
    *,
    topology: TopologyName = "packed",
    bucket_bytes: Count = 25 * MIB,
) -> SyncPlan:
    """Fused messages split over several spanning trees, in the proportions that use the link graph best.

    The trees are written into the plan, so that running it needs no linear program. Another ``topology`` keeps the
    messages and drops the trees.
    """
    trees = None
    if topology == "packed":
        trees = tuple(WeightedTree(weight=tree.weight, parents=tree.parents) for tree in pack_trees(cluster).trees)
    groups = fused_groups(in_ready_order(workload), [bucket_bytes], "bucket", topology=topology, trees=trees)
    return make_plan(workload, cluster, groups)
