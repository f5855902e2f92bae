"""Shared by all builders: grouping of variables into messages, and making a plan from groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import PlanError
from lightning_autosync.plan.spec import Group, SyncPlan
from lightning_autosync.workload import Variable, Workload

MIB = 1024 * 1024


def make_plan(workload: Workload, cluster: ClusterSpec, groups: Iterable[Group]) -> SyncPlan:
    """A synchronous plan for this workload on this cluster."""
    return SyncPlan(workload=workload.variables_fingerprint, world_size=cluster.world_size, groups=tuple(groups))


def in_ready_order(workload: Workload) -> list[Variable]:
    """Variables in the order in which backward computes their gradients."""
    return [workload.variable(name) for name in workload.ready_order]


def lone_group(variable: Variable, **aspects: Any) -> Group:
    """A group of one variable, named after it."""
    return Group(name=variable.name, variables=(variable.name,), **aspects)


def fused_groups(variables: Sequence[Variable], limits: Sequence[int], prefix: str, **aspects: Any) -> Iterator[Group]:
    """Groups of dense variables, each closed when it reaches a limit, and one group for each row-wise variable.

    ``limits`` are bytes. The k-th limit is for the k-th group of each element type, the last one for all that follow.

    Raises:
        PlanError: a limit is below 1.
    """
    if min(limits) < 1:
        raise PlanError(f"message size: {min(limits)} bytes; must be 1 or more")
    dense = [variable for variable in variables if variable.kind == "dense"]
    number = 0
    for dtype in dict.fromkeys(variable.dtype for variable in dense):
        pending: list[Variable] = []
        closed = size = 0
        for variable in [variable for variable in dense if variable.dtype == dtype]:
            pending.append(variable)
            size += variable.bytes
            if size >= limits[min(closed, len(limits) - 1)]:
                yield _fused(prefix, number, pending, aspects)
                pending, number, closed, size = [], number + 1, closed + 1, 0
        if pending:
            yield _fused(prefix, number, pending, aspects)
            number += 1
    for variable in variables:
        if variable.kind != "dense":
            yield lone_group(variable, **{name: value for name, value in aspects.items() if name != "compressor"})


def _fused(prefix: str, number: int, members: Sequence[Variable], aspects: dict[str, Any]) -> Group:
    return Group(name=f"{prefix}{number}", variables=tuple(member.name for member in members), **aspects)


def smallest_divisor(number: int) -> int:
    """The smallest divisor of ``number`` above 1; 1 for 1."""
    return next((divisor for divisor in range(2, number + 1) if number % divisor == 0), 1)


def smallest_non_divisor(number: int) -> int:
    """The smallest integer from 2 to ``number`` that does not divide ``number``; 1 if there is none."""
    return next((count for count in range(2, number + 1) if number % count), 1)


def axis_length(variable: Variable, axis: int = 0) -> int:
    """Number of slices along an axis, by default the axis that AutoDist's partitioners cut; 1 for a scalar."""
    return variable.shape[axis] if variable.shape else 1
