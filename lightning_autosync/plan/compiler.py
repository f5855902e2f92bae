"""`compile_plan`: from a plan, a workload and a cluster to the Schedule that engine and replay share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain, pairwise

from lightning_autosync.cluster import ClusterSpec, pack_trees
from lightning_autosync.errors import PlanError
from lightning_autosync.plan.encoding import ITEMSIZE, low_rank_layout
from lightning_autosync.plan.partitioning import cut, even_bounds, weighted_bounds
from lightning_autosync.plan.schedule import (
    AllReduce,
    AllToAll,
    Message,
    Round,
    Schedule,
    SharedMemoryReduce,
    Transfer,
    TreeTransfer,
    TwoLevelAllReduce,
)
from lightning_autosync.plan.spec import Group, SyncPlan
from lightning_autosync.plan.trees import Tree, binary, chain_down, chain_up, spread
from lightning_autosync.workload import Variable, Workload

LARGEST_SEGMENT = 128 * 1024
"""Bytes; larger pieces lose the overlap of levels, smaller ones pay per-message cost (measured on shaped links)."""
SMALLEST_SEGMENT = 32 * 1024
CACHE_LINE = 64
"""Bytes; ranks that write to one line of shared memory at the same time slow each other down."""
PIECES = 96
"""Pieces that a transfer is cut into where the limits above allow: filling a tree of depth d costs d of them."""


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
        workload: the variables; names and shapes must be those that the plan was made for.
        cluster: nodes and links; ``world_size`` must be the plan's.
        source: what to call the plan in errors, a file name for example.
        two_level_collectives: whether hierarchical all-reduces run as collectives in two levels and not along trees;
            right where the backend is NCCL.

    Raises:
        PlanError: if plan, workload and cluster do not fit each other.
    """
    if plan.world_size != cluster.world_size:
        raise PlanError(
            f"{source}: world_size: the plan is for {plan.world_size} ranks, cluster '{cluster.name}' has "
            f"{cluster.world_size}"
        )
    if not plan.has_schedule:
        raise PlanError(
            f"{source}: consistency.mode: '{plan.consistency.mode}' has no schedule; only 'synchronous' has, where "
            "`served` is not set"
        )
    if plan.servers:
        raise PlanError(
            f"{source}: servers: {plan.servers} server-only ranks, but without an update on the servers only the ranks "
            "that train exchange gradients; leave it out"
        )
    check_variables(plan, workload, source)
    shapes = _Shapes(cluster, two_level_collectives)
    messages = []
    for index, group in enumerate(plan.groups):
        variables = [workload.variable(name) for name in group.variables]
        try:
            messages.append(_compile_group(index, group, variables, shapes))
        except ValueError as error:
            raise PlanError(f"{source}: groups[{index}] '{group.name}': {error}") from None
    return Schedule(plan.world_size, tuple(messages))


def check_variables(plan: SyncPlan, workload: Workload, source: str) -> None:
    """Raise ``PlanError`` unless the plan's variables are exactly the workload's."""
    present = {variable.name for variable in workload.variables}
    planned = {name for group in plan.groups for name in group.variables}
    for index, group in enumerate(plan.groups):
        for name in group.variables:
            if name not in present:
                raise PlanError(f"{source}: groups[{index}].variables: the model has no trainable parameter '{name}'")
    if missing := [variable.name for variable in workload.variables if variable.name not in planned]:
        raise PlanError(
            f"{source}: groups: parameter '{missing[0]}' is in no group ({len(missing)} such); every one must be"
        )
    if plan.workload is not None and plan.workload != workload.variables_fingerprint:
        raise PlanError(
            f"{source}: workload: the plan was made for a model with fingerprint {plan.workload}, this one has "
            f"{workload.variables_fingerprint} (names or shapes of parameters differ)"
        )


def _compile_group(index: int, group: Group, variables: Sequence[Variable], shapes: _Shapes) -> Message:
    dtypes = sorted({variable.dtype for variable in variables})
    if len(dtypes) > 1:
        raise ValueError(f"variables: one message has one element type, these have {', '.join(dtypes)}")
    rows = row_count(group, variables)
    if group.topology == "shared_memory":
        _check_shared(rows, variables[0], shapes.cluster)
    numel = sum(variable.numel for variable in variables)
    itemsize = ITEMSIZE[dtypes[0]]
    axis = (group.partition.axis if group.partition else None) or 0
    tail = 0 if rows else len(variables)
    if group.compressor.kind == "powersgd":
        _, lengths = low_rank_layout([variable.shape for variable in variables], group.compressor.rank)
        cut(group.partition, [(numel,)])  # refuses more shards than elements; short factors may leave some empty
        weights = group.partition.weights if group.partition else None
        cuts = [weighted_bounds(length, group.shards, weights) for length in lengths]
    else:
        partition = group.partition
        if rows and partition:
            partition = partition.model_copy(update={"axis": 0})
        cuts = [cut(partition, [variable.shape for variable in variables])]
    cuts[0] = (*cuts[0][:-1], cuts[0][-1] + tail)
    width = numel // rows if rows else None
    rounds = tuple(Round(bounds[-1], tuple(_transfers(group, bounds, shapes, itemsize, width))) for bounds in cuts)
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
        rounds=rounds,
    )


def _check_shared(rows: int, first: Variable, cluster: ClusterSpec) -> None:
    if rows:
        raise ValueError(
            f"topology: 'shared_memory' holds dense gradients, '{first.name}' has {first.kind} ones; give it another"
        )
    if len({*cluster.rank_nodes}) > 1:
        raise ValueError(
            f"topology: 'shared_memory' needs all ranks on one node, cluster '{cluster.name}' has them on "
            f"{len({*cluster.rank_nodes})}"
        )


def row_count(group: Group, variables: Sequence[Variable]) -> int:
    """Rows of a row-wise message, 0 for a dense one."""
    row_wise = [variable for variable in variables if variable.kind != "dense"]
    if not row_wise:
        return 0
    if len(variables) > 1:
        raise ValueError(f"variables: '{row_wise[0].name}' has {row_wise[0].kind} gradients and must travel alone")
    if group.compressor.kind != "none":
        raise ValueError(
            f"compressor: rows of a {row_wise[0].kind} variable travel exact; only 'none' is allowed, "
            f"not '{group.compressor.kind}'"
        )
    if group.partition and group.partition.axis:
        raise ValueError(f"partition.axis: a {row_wise[0].kind} variable is cut along its rows; axis must be 0")
    return row_wise[0].shape[0]


def _transfers(
    group: Group, bounds: Sequence[int], shapes: _Shapes, itemsize: int, width: int | None
) -> Iterator[Transfer]:
    """The transfers between ``bounds``; ``width`` is the elements of a row of a row-wise message, None of a dense."""
    owners = group.placement or (0,) * group.shards
    if width is None and shapes.in_two_levels(group):
        for start, stop in pairwise(bounds):
            if stop > start:
                yield TwoLevelAllReduce(start, stop, shapes.places)
        return
    if group.topology == "native":
        yield from _native_transfers(group, bounds, owners, shapes)
        return
    if group.topology == "shared_memory":
        for start, stop in pairwise(bounds):
            if stop > start:
                yield _shared_transfer(start, stop, shapes.cluster.world_size, itemsize)
        return
    for shard, (start, stop) in enumerate(pairwise(bounds)):
        root = owners[shard] if group.architecture == "parameter_server" else None
        for lower, upper, reduce, broadcast in _tree_ranges(group, shard, root, start, stop, width or 1, shapes):
            if upper > lower:
                yield TreeTransfer(lower, upper, reduce, broadcast, _segment(group, upper - lower, itemsize))


def _native_transfers(
    group: Group, bounds: Sequence[int], owners: Sequence[int], shapes: _Shapes
) -> Iterator[Transfer]:
    if group.architecture == "parameter_server":
        yield AllToAll(tuple(bounds), tuple(owners))
        return
    if group.compressor.kind in ("int8", "topk"):
        # Sums of encoded blocks are not encoded blocks, so a backend cannot reduce them: the owners do.
        ranks = shapes.cluster.world_size
        cuts = [even_bounds(start, stop, ranks)[:-1] for start, stop in pairwise(bounds)]
        yield AllToAll((*chain.from_iterable(cuts), bounds[-1]), tuple(range(ranks)) * len(cuts))
        return
    for start, stop in pairwise(bounds):
        if stop > start:
            yield AllReduce(start, stop)


def _shared_transfer(start: int, stop: int, ranks: int, itemsize: int) -> SharedMemoryReduce:
    """A range in equal parts, cut between cache lines of the buffer."""
    line = CACHE_LINE // itemsize
    cuts = (round(edge / line) * line for edge in even_bounds(start, stop, ranks)[1:-1])
    return SharedMemoryReduce((start, *(min(stop, max(start, cut)) for cut in cuts), stop))


def _tree_ranges(
    group: Group, shard: int, root: int | None, start: int, stop: int, unit: int, shapes: _Shapes
) -> Iterator[tuple[int, int, Tree, Tree]]:
    """The trees of one shard and the range of elements that each carries.

    ``root`` None lets every rank be one; ranges are cut at multiples of ``unit`` elements.
    """
    slices = (stop - start) // unit
    if group.topology == "packed":
        weighted = [(tree.weight, Tree(tree.parents)) for tree in group.trees] if group.trees else shapes.packed
        trees = [tree if root is None else tree.rerooted(root) for _, tree in weighted]
        edges = weighted_bounds(slices, len(trees), [weight for weight, _ in weighted])
        for tree, lower, upper in zip(trees, edges, edges[1:], strict=False):
            yield start + unit * lower, start + unit * upper, tree, tree
    elif root is not None:
        yield start, stop, *shapes.pair(group, root, shard)
    else:
        edges = even_bounds(0, slices, shapes.cluster.world_size)
        for rank, (lower, upper) in enumerate(pairwise(edges)):
            yield start + unit * lower, start + unit * upper, *shapes.pair(group, rank, shard)


def _segment(group: Group, numel: int, itemsize: int) -> int:
    """Elements of a pipelined piece."""
    size = group.segment or min(LARGEST_SEGMENT, max(SMALLEST_SEGMENT, numel * itemsize // PIECES))
    return max(1, int(size) // itemsize)


@dataclass
class _Shapes:
    """The trees that a cluster offers."""

    cluster: ClusterSpec
    two_level_collectives: bool
    _pairs: dict[tuple[str, bool, int, int], tuple[Tree, Tree]] = field(default_factory=dict)

    def in_two_levels(self, group: Group) -> bool:
        """Whether a group's messages take collectives in two levels: equal places, sums of what is sent."""
        sizes = {len(ranks) for ranks in self.places}
        return (
            self.two_level_collectives
            and group.topology == "hierarchical"
            and group.architecture == "all_reduce"
            and group.compressor.kind in ("none", "powersgd")
            and len(sizes) == 1
        )

    @cached_property
    def packed(self) -> list[tuple[float, Tree]]:
        return [(tree.weight, Tree(tree.parents)) for tree in pack_trees(self.cluster).trees]

    @cached_property
    def places(self) -> tuple[tuple[int, ...], ...]:
        return self.cluster.localities()

    @cached_property
    def nodes(self) -> list[tuple[int, ...]]:
        return [self.cluster.ranks_of(node) for node in range(len(self.cluster.nodes))]

    def pair(self, group: Group, root: int, rotation: int) -> tuple[Tree, Tree]:
        """Reduce and broadcast tree with the given root; ``rotation`` spreads the work of leading over ranks.

        Made once: a plan of many messages asks for the same few again and again.
        """
        key = group.topology, group.local_aggregation, root, rotation
        if key not in self._pairs:
            self._pairs[key] = self._make_pair(group, root, rotation)
        return self._pairs[key]

    def _make_pair(self, group: Group, root: int, rotation: int) -> tuple[Tree, Tree]:
        if group.topology == "hierarchical":
            leaders, members = _lead(self.places, root, rotation)
        elif group.local_aggregation:
            leaders, members = _lead(self.nodes, root, rotation)
        else:
            leaders, members = list(range(self.cluster.world_size)), {}
        up, down = {"ring": (chain_up, chain_down), "tree": (binary, binary)}.get(group.topology, (spread, spread))
        return _tree(up(leaders, root) | members), _tree(down(leaders, root) | members)


def _lead(places: Sequence[Sequence[int]], root: int, rotation: int) -> tuple[list[int], dict[int, int]]:
    """One leader a place, and the parents of the ranks that they lead; the root leads its own place."""
    seat = rotation + next(ranks.index(root) for ranks in places if root in ranks)
    leaders = [root if root in ranks else ranks[seat % len(ranks)] for ranks in places]
    members = {rank: leader for leader, ranks in zip(leaders, places, strict=True) for rank in ranks if rank != leader}
    return leaders, members


def _tree(parents: dict[int, int]) -> Tree:
    return _checked(tuple(parents[rank] for rank in range(len(parents))))


@lru_cache(maxsize=4096)
def _checked(parents: tuple[int, ...]) -> Tree:
    """The tree of these parents; plans for one cluster are made of few."""
    return Tree(parents)
