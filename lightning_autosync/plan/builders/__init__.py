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
from lightning_autosync.plan.builders.arguments import checked, told_of
from lightning_autosync.plan.builders.links import hierarchical, packed_trees, parallax
from lightning_autosync.plan.builders.parameter_server import (
    byteps,
    partitioned_ps,
    ps,
    ps_load_balancing,
    uneven_partitioned_ps,
)
from lightning_autosync.plan.builders.relaxed import asynchronous, bounded_staleness, partial_reduce, periodic
from lightning_autosync.plan.builders.shared_memory import shared_memory
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
        shared_memory,
    )
}
"""Builders of synchronous plans, which have a schedule."""

RELAXED_BUILDERS: dict[str, Callable[..., SyncPlan]] = {
    builder.__name__: builder for builder in (partial_reduce, periodic, bounded_staleness, asynchronous)
}


def find(name: str) -> Callable[..., SyncPlan]:
    """The builder with this name.

    Raises:
        PlanError: there is no such builder.
    """
    known = BUILDERS | RELAXED_BUILDERS
    if name not in known:
        raise PlanError(
            f"plan: '{name}' is neither a file (.yaml, .yml, .json) nor a builder; the builders are {', '.join(known)}"
        )
    return known[name]


def build(name: str, workload: Workload, cluster: ClusterSpec, /, **arguments: Any) -> SyncPlan:
    """The plan of the builder with this name.

    Raises:
        PlanError: there is no such builder, or it does not take these arguments, each or together.
    """
    builder = find(name)
    with told_of(builder):
        return builder(workload, cluster, **checked(builder, arguments))


__all__ = ["BUILDERS", "RELAXED_BUILDERS", "build", "find", *BUILDERS, *RELAXED_BUILDERS]
