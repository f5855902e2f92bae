"""Random plans, for property tests."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from lightning_autosync.plan import Compressor, Group, Partition, SyncPlan, Tree, WeightedTree, topologies
from lightning_autosync.workload import Variable, Workload


@st.composite
def trees(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    """Parents of a random tree: each rank but the first in a random order hangs on one before it."""
    order = draw(st.permutations(range(size)))
    parents = [-1] * size
    for place in range(1, size):
        parents[order[place]] = order[draw(st.integers(0, place - 1))]
    return tuple(parents)


@st.composite
def weighted_trees(draw: st.DrawFn, size: int) -> WeightedTree:
    """A random tree, or a random pair of trees with one root."""
    parents = draw(trees(size))
    root = parents.index(-1)
    broadcast = Tree(draw(trees(size))).rerooted(root).parents if draw(st.booleans()) else None
    return WeightedTree(weight=draw(st.sampled_from([0.2, 1.0, 2.5])), parents=parents, broadcast=broadcast)


@st.composite
def partitions(draw: st.DrawFn, variables: Sequence[Variable], axes: bool) -> Partition | None:
    if draw(st.booleans()):
        return None
    axis, slices = None, sum(variable.numel for variable in variables)
    if variables[0].kind != "dense":
        slices = variables[0].shape[0]
    elif len(variables) == 1 and axes and draw(st.booleans()):
        shape = variables[0].shape or (1,)
        axis = draw(st.integers(0, len(shape) - 1))
        slices = shape[axis]
    shards = draw(st.integers(1, min(slices, 6)))
    weights = None
    if draw(st.booleans()):
        weights = tuple(
            draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=shards, max_size=shards).filter(any))
        )
    return Partition(axis=axis, shards=shards, weights=weights)


@st.composite
def groups(
    draw: st.DrawFn, number: int, variables: Sequence[Variable], size: int, lossy: bool, one_node: bool = False
) -> Group:
    architecture = draw(st.sampled_from(["all_reduce", "parameter_server"]))
    dense = variables[0].kind == "dense"
    allowed = [
        one
        for one in map(topologies.find, topologies.names())
        if architecture in one.architectures
        and not (one.rows_only if dense else one.dense_only)
        and (one_node or not one.one_node_only)
        and (one.compresses or not lossy)
    ]
    topology = draw(st.sampled_from(allowed)).name
    kinds = ["fp16", "bf16", "int8", "topk", "powersgd"] if lossy else ["none"]
    compressor = Compressor(kind=draw(st.sampled_from(kinds)))
    partition = draw(partitions(variables, axes=compressor.kind != "powersgd"))
    shards = partition.shards if partition else 1
    ranks = st.integers(0, size - 1)
    return Group(
        name=f"group{number}",
        variables=tuple(variable.name for variable in variables),
        architecture=architecture,
        topology=topology,
        partition=partition,
        placement=tuple(draw(st.lists(ranks, min_size=shards, max_size=shards)))
        if architecture == "parameter_server" and draw(st.booleans())
        else None,
        trees=tuple(draw(st.lists(weighted_trees(size), min_size=1, max_size=4)))
        if topologies.find(topology).takes_trees and draw(st.booleans())
        else None,
        compressor=compressor,
        local_aggregation=topologies.find(topology).aggregates
        and not topologies.find(topology).two_level
        and draw(st.booleans()),
        priority=draw(st.integers(-2, 2)),
        segment=draw(st.sampled_from([None, 1024, 4096])) if topologies.find(topology).segmented else None,
    )


@st.composite
def plans(draw: st.DrawFn, workload: Workload, size: int, lossy: bool = False, one_node: bool = False) -> SyncPlan:
    """A valid plan for ``workload`` among ``size`` ranks, any aspect of which may take any value."""
    pending = list(draw(st.permutations(workload.variables)))
    made = []
    while pending:
        dtype = pending[0].dtype
        count = 1 if pending[0].kind != "dense" else draw(st.integers(1, len(pending)))
        members = [
            variable for variable in pending[:count] if variable.dtype == dtype and variable.kind == "dense"
        ] or pending[:1]
        pending = [variable for variable in pending if variable not in members]
        made.append(draw(groups(len(made), members, size, lossy, one_node)))
    return SyncPlan(workload=workload.variables_fingerprint, world_size=size, groups=tuple(made))
