"""Builders of relaxed plans, whose replicas need not be equal after each step."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import Count, Index, Integer
from lightning_autosync.errors import PlanError
from lightning_autosync.plan.builders.all_reduce import all_reduce
from lightning_autosync.plan.builders.parameter_server import byteps
from lightning_autosync.plan.builders.registry import register
from lightning_autosync.plan.spec import Consistency, OuterKind, SyncPlan
from lightning_autosync.workload import Workload


@register(relaxed=True)
def partial_reduce(
    workload: Workload,
    cluster: ClusterSpec,
    *,
    group_size: Annotated[Integer, Field(ge=2)] | None = None,
    weighting: Literal["constant", "dynamic"] = "dynamic",
) -> SyncPlan:
    """Partial Reduce (SIGMOD 2021): after each step, the workers that are ready average their models.

    Args:
        workload: the variables.
        cluster: the cluster on which they are synchronized.
        group_size: number of ranks per group (P). None takes the largest divisor of the number of ranks up to half of
            it, but at least 2; a P that is not a divisor leaves workers idle.
        weighting: ``dynamic`` weights depend on staleness, ``constant`` weights do not.

    Raises:
        PlanError: there is only one rank, or there are fewer than ``group_size``.
    """
    ranks = cluster.world_size
    if ranks < 2:
        raise PlanError("partial_reduce: a group needs two ranks, the cluster has one")
    if group_size is not None and group_size > ranks:
        raise PlanError(f"group_size: {group_size} is above the number of ranks, {ranks}")
    chosen = group_size or max([size for size in range(2, ranks // 2 + 1) if ranks % size == 0], default=2)
    return _with(
        all_reduce(workload, cluster),
        Consistency(mode="partial_reduce", group_size=chosen, weighting=weighting),
    )


@register(relaxed=True)
def periodic(
    workload: Workload, cluster: ClusterSpec, *, period: Count = 8, outer: OuterKind = "averaging", warmup: Index = 0
) -> SyncPlan:
    """Local SGD: replicas average every ``period`` steps, and after each of the first ``warmup`` steps."""
    return _with(
        all_reduce(workload, cluster),
        Consistency(mode="periodic", period=period, outer=outer, warmup=warmup or None),
    )


@register(relaxed=True)
def bounded_staleness(workload: Workload, cluster: ClusterSpec, *, staleness: Index = 3) -> SyncPlan:
    """Stale synchronous parallel (Ho et al., 2013): servers update; no rank is more than ``staleness`` steps ahead."""
    return _with(byteps(workload, cluster), Consistency(mode="bounded_staleness", staleness=staleness))


@register(relaxed=True)
def asynchronous(workload: Workload, cluster: ClusterSpec) -> SyncPlan:
    """Servers apply each gradient on arrival, and no rank waits (Hogwild over a network)."""
    return _with(byteps(workload, cluster), Consistency(mode="asynchronous"))


def _with(plan: SyncPlan, consistency: Consistency) -> SyncPlan:
    return plan.model_copy(update={"consistency": consistency})
