"""Builder for ranks on one machine."""

from __future__ import annotations

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import Count
from lightning_autosync.plan.builders.grouping import MIB, fused_groups, in_ready_order, lone_group, make_plan
from lightning_autosync.plan.builders.registry import register
from lightning_autosync.plan.spec import SyncPlan
from lightning_autosync.workload import Workload


@register(takes_topology=False)
def shared_memory(workload: Workload, cluster: ClusterSpec, *, bucket_bytes: Count = 100 * MIB) -> SyncPlan:
    """Fused dense variables in memory that all ranks map; row-wise variables by the backend's collectives.

    Messages are large, because there is no wire time to overlap and each message costs two hand-overs between the
    ranks. `compile_plan` refuses the plan for a cluster of several nodes.

    Args:
        workload: the variables.
        cluster: the single node on which they are synchronized.
        bucket_bytes: bytes at which a message closes.
    """
    ordered = in_ready_order(workload)
    dense = [variable for variable in ordered if variable.kind == "dense"]
    groups = list(fused_groups(dense, [bucket_bytes], "shared", topology="shared_memory"))
    groups += [lone_group(variable) for variable in ordered if variable.kind != "dense"]
    return make_plan(workload, cluster, groups)
