"""Row-wise variables: whether their rows travel to a server and back, or once, from every rank to all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from lightning_autosync.cluster import ClusterSpec, LinkGraph
from lightning_autosync.documents import Count
from lightning_autosync.errors import PlanError
from lightning_autosync.plan.builders.grouping import MIB, fused_groups, in_ready_order, lone_group, make_plan
from lightning_autosync.plan.builders.registry import register
from lightning_autosync.plan.compiler import compile_plan
from lightning_autosync.plan.schedule import Message, RowBroadcast, TreeTransfer, index_bytes, used_broadcasts
from lightning_autosync.plan.spec import Group, Partition, SyncPlan
from lightning_autosync.plan.trees import Tree
from lightning_autosync.workload import Variable, Workload

GATHERED = "gather_rows"
ADDING_RATE = 5.2e9
"""Bytes/s of touched rows that one core adds up, as measured on one host."""


@register(takes_topology=False)
def gathered_rows(workload: Workload, cluster: ClusterSpec, *, bucket_bytes: Count = 25 * MIB) -> SyncPlan:
    """Fused all-reduce for dense variables; every rank sends its touched rows of the others to all ranks, once.

    Raises:
        PlanError: all variables are dense.
    """
    order = in_ready_order(workload)
    if all(variable.kind == "dense" for variable in order):
        raise PlanError("builder 'gathered_rows': no variable has row-wise gradients; use 'all_reduce'")
    groups = [lone_group(variable, topology=GATHERED) for variable in order if variable.kind != "dense"]
    dense = [variable for variable in order if variable.kind == "dense"]
    return make_plan(workload, cluster, [*groups, *fused_groups(dense, [bucket_bytes], "bucket")])


def place_rows(plan: SyncPlan, workload: Workload, cluster: ClusterSpec) -> SyncPlan:
    """The plan, with the rows of each row-wise variable gathered once where that takes no longer than servers.

    What counts is the time of the links, and after it the time in which each rank adds up the gathered rows of all
    ranks. (Servers add up rows while others travel.) Rows on ``native`` are served otherwise; see `serve_rows`. Nothing
    else changes where the rates of the links or the number of touched rows are unknown.
    """
    served = serve_rows(plan, workload)
    row_wise = {v.name: v for v in workload.variables if v.kind != "dense" and v.rows is not None and v.numel}
    places = [place for place, group in enumerate(served.groups) if group.variables[0] in row_wise]
    if not places or not cluster.measured or cluster.world_size == 1:
        return served
    merging = [served.groups[place] for place in places]
    gathering = [
        Group(name=group.name, variables=group.variables, topology=GATHERED, priority=group.priority)
        for group in merging
    ]
    variables = [row_wise[group.variables[0]] for group in merging]
    merged, gathered = (_rows_times(groups, variables, cluster) for groups in (merging, gathering))
    return _with_groups(
        served,
        {
            place: group
            for place, group, once, twice in zip(places, gathering, gathered, merged, strict=True)
            if once <= twice
        },
    )


def serve_rows(plan: SyncPlan, workload: Workload) -> SyncPlan:
    """The plan, changed so that every rank sums an equal share of the rows of each row-wise variable on ``native``.

    The backend's own exchange gathers the rows of all ranks on every rank. It is slower than a dense all-reduce if many
    ranks touch many rows. With shares, rows never cost more than the dense table and the indices.
    """
    groups = {
        index: group.model_copy(update=_served(plan.world_size, workload.variable(group.variables[0]).shape[0]))
        for index, group in enumerate(plan.groups)
        if group.topology == "native" and workload.variable(group.variables[0]).kind != "dense"
    }
    return _with_groups(plan, groups)


def _rows_times(groups: Sequence[Group], variables: Sequence[Variable], cluster: ClusterSpec) -> list[float]:
    """Seconds to exchange the touched rows of each group's variable; see `rows_time`."""
    plan = SyncPlan(world_size=cluster.world_size, groups=tuple(groups))
    tables = tuple(variable.model_copy(update={"ready": None}) for variable in variables)
    schedule = compile_plan(plan, Workload(name="rows", variables=tables), cluster)
    links = LinkGraph(cluster)
    return [rows_time(*one, links) for one in zip(schedule.messages, variables, strict=True)]


def rows_time(message: Message, variable: Variable, links: LinkGraph) -> float:
    """Seconds to exchange the touched rows of ``variable`` over trees, and to add up those that travel once.

    Ranks are assumed to draw their rows independently. Indices and framing add the same share to all ways.
    """
    untouched = 1 - variable.touched_share
    loads, added = numpy.zeros_like(links.capacities), 0.0
    transfers, size = message.rounds[0].transfers, variable.touched_share * variable.bytes
    broadcasts = [transfer for transfer in transfers if isinstance(transfer, RowBroadcast)]
    sent = size + index_bytes(variable.shape[0]) * variable.touched_share * variable.shape[0]
    for broadcast, share in used_broadcasts(broadcasts, sent) if broadcasts else ():
        added += len(broadcast.trees) * share * size
        for tree in broadcast.trees:
            loads += share * size * links.loads(_down(tree))
    for transfer in transfers:
        if isinstance(transfer, RowBroadcast):
            continue
        assert isinstance(transfer, TreeTransfer)
        part = (transfer.stop - transfer.start) / message.numel * variable.bytes
        below = _below(transfer.reduce)
        for parent, rank in _down(transfer.reduce):
            loads += part * (1 - untouched ** below[rank]) * links.loads([(rank, parent)])
        loads += part * (1 - untouched ** len(below)) * links.loads(_down(transfer.broadcast))
    return float((loads / links.capacities).max(initial=0.0)) + added / ADDING_RATE


def _down(tree: Tree) -> list[tuple[int, int]]:
    """Each rank's parent and the rank."""
    return [(parent, rank) for rank, parent in enumerate(tree.parents) if parent >= 0]


def _below(tree: Tree) -> Sequence[int]:
    """[ranks] number of ranks in the subtree of each rank, itself included."""
    sizes = [0] * tree.size
    for rank in range(tree.size):
        above = rank
        while above >= 0:
            sizes[above] += 1
            above = tree.parents[above]
    return sizes


def _with_groups(plan: SyncPlan, changed: dict[int, Group]) -> SyncPlan:
    groups = tuple(changed.get(index, group) for index, group in enumerate(plan.groups))
    return plan.model_copy(update={"groups": groups}) if changed else plan


def _served(ranks: int, rows: int) -> dict[str, Any]:
    shards = min(ranks, rows)
    return {
        "architecture": "parameter_server",
        "topology": "star",
        "partition": Partition(shards=shards),
        "placement": tuple(range(shards)),
    }
