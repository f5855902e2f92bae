"""Builders that use sparsity or the link graph."""

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
    """Parallax (EuroSys 2019): fused all-reduce for dense variables, balanced parameter servers for row-wise ones.

    If ``topology`` is None, dense variables get ``native`` and row-wise ones ``star``.
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
    """Fused two-level all-reduce: first inside each node (or rack of one-device nodes), then between them.

    With ``ring``, ``tree`` or ``star`` the leaders of the nodes use that topology after local aggregation.
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

    The plan contains the trees, so that running it needs no linear program. With another ``topology`` the messages are
    the same, but without trees.
    """
    trees = None
    if topology == "packed":
        trees = tuple(WeightedTree.model_validate(vars(tree)) for tree in pack_trees(cluster).trees)
    groups = fused_groups(in_ready_order(workload), [bucket_bytes], "bucket", topology=topology, trees=trees)
    return make_plan(workload, cluster, groups)
