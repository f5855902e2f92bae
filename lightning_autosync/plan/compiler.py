"""`compile_plan`: turns a plan, a workload and a cluster into the Schedule that engine and replay share."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import counted
from lightning_autosync.errors import PlanError
from lightning_autosync.plan import codecs
from lightning_autosync.plan.messages import ITEMSIZE, cut, weighted_bounds
from lightning_autosync.plan.schedule import Message, Round, Schedule
from lightning_autosync.plan.spec import Group, SyncPlan
from lightning_autosync.plan.topologies import MessageCut, Site, find
from lightning_autosync.workload import Variable, Workload


def compile_plan(
    plan: SyncPlan,
    workload: Workload,
    cluster: ClusterSpec,
    source: str = "plan",
    two_level_collectives: bool = False,
) -> Schedule:
    """Compile a synchronous plan.

    Args:
        plan: how each variable is synchronized.
        workload: the variables, with the names and shapes for which the plan was made.
        cluster: nodes and links, with the plan's ``world_size``.
        source: name of the plan in errors, for example its file.
        two_level_collectives: whether hierarchical all-reduces run as two-level collectives instead of along trees;
            use it with NCCL.

    Raises:
        PlanError: plan, workload and cluster do not fit each other.
    """
    if plan.world_size != cluster.world_size:
        raise PlanError(
            f"{source}: world_size: the plan is for {plan.world_size} ranks, but cluster '{cluster.name}' has "
            f"{cluster.world_size}; give a plan for {cluster.world_size} ranks, or use {plan.world_size}"
        )
    if not plan.has_schedule:
        raise PlanError(
            f"{source}: consistency.mode: '{plan.consistency.mode}' has no schedule; allowed: 'synchronous' "
            "without `served`"
        )
    if plan.servers:
        raise PlanError(
            f"{source}: servers: {plan.servers} server-only ranks are not allowed, because servers do not update "
            "parameters under this plan; leave it out"
        )
    check_variables(plan, workload, source)
    site = Site(cluster, two_level_collectives)
    messages = []
    for index, group in enumerate(plan.groups):
        if group.local_aggregation and find(group.topology).two_level:
            warnings.warn(
                f"{source}: groups[{index}] '{group.name}': local_aggregation: topology '{group.topology}' sums inside "
                "nodes in any case; leave this field out, because a later release will refuse it",
                FutureWarning,
                stacklevel=2,
            )
        variables = [workload.variable(name) for name in group.variables]
        try:
            messages.append(_compile_group(index, group, variables, site))
        except ValueError as error:
            raise PlanError(f"{source}: groups[{index}] '{group.name}': {error}") from None
    return Schedule(plan.world_size, tuple(messages), plan.waits)


def check_variables(plan: SyncPlan, workload: Workload, source: str) -> None:
    """Raise ``PlanError`` unless the plan's variables are exactly the workload's."""
    present = {variable.name for variable in workload.variables}
    planned = {name for group in plan.groups for name in group.variables}
    for index, group in enumerate(plan.groups):
        for name in group.variables:
            if name not in present:
                raise PlanError(
                    f"{source}: groups[{index}].variables: the model has no trainable parameter '{name}' "
                    f"({len(planned - present)} of the plan's {counted(len(planned), 'parameter')} are not in it); "
                    "give a plan that was made for this model"
                )
    if missing := [variable.name for variable in workload.variables if variable.name not in planned]:
        raise PlanError(
            f"{source}: groups: {len(missing)} of the model's {counted(len(present), 'parameter')} "
            f"{'is' if len(missing) == 1 else 'are'} in no group, such as '{missing[0]}'; each must be in one"
        )
    if plan.workload is not None and plan.workload != workload.variables_fingerprint:
        raise PlanError(
            f"{source}: workload: the plan was made for a model with fingerprint {plan.workload}, but this model has "
            f"{workload.variables_fingerprint} (names or shapes of parameters differ)"
        )


def _compile_group(index: int, group: Group, variables: Sequence[Variable], site: Site) -> Message:
    dtypes = sorted({variable.dtype for variable in variables})
    if len(dtypes) > 1:
        raise ValueError(f"variables: a group must have one dtype, got {', '.join(dtypes)}")
    rows = row_count(group, variables)
    topology = find(group.topology)
    topology.check_site(site, variables[0], rows)
    numel = sum(variable.numel for variable in variables)
    itemsize = ITEMSIZE[dtypes[0]]
    axis = (group.partition.axis if group.partition else None) or 0
    tail = 0 if rows else len(variables)
    shapes = [variable.shape for variable in variables]
    if lengths := codecs.find(group.compressor.kind).rounds(group.compressor, shapes):
        cut(group.partition, [(numel,)])  # refuses more shards than elements; short factors may leave some empty
        weights = group.partition.weights if group.partition else None
        cuts = [weighted_bounds(length, group.shards, weights) for length in lengths]
    else:
        partition = group.partition
        if rows and partition:
            partition = partition.model_copy(update={"axis": 0})
        cuts = [cut(partition, shapes)]
    cuts[0] = (*cuts[0][:-1], cuts[0][-1] + tail)
    width = numel // rows if rows else None
    rounds = (Round(at[-1], tuple(topology.transfers(group, MessageCut(at, itemsize, width), site))) for at in cuts)
    return Message(
        index=index,
        name=group.name,
        variables=group.variables,
        numel=numel,
        dtype=dtypes[0],
        axis=axis,
        rows=rows,
        sparse=variables[0].kind == "sparse",
        compressor=group.compressor,
        priority=group.priority,
        rounds=tuple(rounds),
    )


def row_count(group: Group, variables: Sequence[Variable]) -> int:
    """Number of rows of a row-wise message, 0 for a dense one.

    Raises:
        ValueError: a row-wise variable is grouped with others, compressed, or cut along another axis than 0.
    """
    row_wise = [variable for variable in variables if variable.kind != "dense"]
    if not row_wise:
        return 0
    if len(variables) > 1:
        first = row_wise[0]
        raise ValueError(f"variables: '{first.name}' has {first.kind} gradients and needs a group of its own")
    if group.compressor.kind != "none":
        raise ValueError(
            f"compressor: a {row_wise[0].kind} variable cannot be compressed; only 'none' is allowed, "
            f"not '{group.compressor.kind}'"
        )
    if group.partition and group.partition.axis:
        raise ValueError(f"partition.axis: a {row_wise[0].kind} variable is cut along its rows; axis must be 0")
    return row_wise[0].shape[0]
