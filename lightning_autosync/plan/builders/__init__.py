"""Plans by rule: each builder takes a workload and a cluster and returns a `SyncPlan`.

AutoDist's strategy builders, and those that follow the links.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import PlanError
from lightning_autosync.plan.builders.all_reduce import (
    all_reduce,
    partitioned_all_reduce,
    random_axis_partitioned_all_reduce,
)
from lightning_autosync.plan.builders.links import hierarchical, packed_trees, parallax
from lightning_autosync.plan.builders.parameter_server import (
    byteps,
    partitioned_ps,
    ps,
    ps_load_balancing,
    uneven_partitioned_ps,
)
from lightning_autosync.plan.spec import SyncPlan
from lightning_autosync.workload import Workload

BUILDERS: dict[str, Callable[..., SyncPlan]] = {
    builder.__name__: builder
    for builder in (
        all_reduce,
        partitioned_all_reduce,
        random_axis_partitioned_all_reduce,
        ps,
        ps_load_balancing,
        partitioned_ps,
        uneven_partitioned_ps,
        byteps,
        parallax,
        hierarchical,
        packed_trees,
    )
}


def build(name: str, workload: Workload, cluster: ClusterSpec, **arguments: Any) -> SyncPlan:
    """The plan of the builder with this name.

    Raises:
        PlanError: there is no such builder.
    """
    if name not in BUILDERS:
        raise PlanError(f"plan: '{name}' is neither a file nor a builder; the builders are {', '.join(BUILDERS)}")
    return BUILDERS[name](workload, cluster, **arguments)


__all__ = ["BUILDERS", "build", *BUILDERS]
