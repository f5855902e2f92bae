"""`server_layout`: which server keeps and updates which slice of which parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from lightning_autosync.documents import digest
from lightning_autosync.errors import PlanError
from lightning_autosync.plan.compiler import check_variables, row_count
from lightning_autosync.plan.messages import ITEMSIZE, cut, even_bounds
from lightning_autosync.plan.spec import Group, Partition, SyncPlan
from lightning_autosync.workload import Variable, Workload

MODES = ("synchronous", "bounded_staleness", "asynchronous")
"""Consistency modes under which servers can update the parameters."""


@dataclass(frozen=True)
class Piece:
    """Elements ``[start, stop)`` of one variable with its shard's ``axis`` moved to the front."""

    variable: str
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Shard:
    """The part of a group that one server keeps: pieces of its variables, one after the other.

    Attributes:
        index: position in the layout.
        group: name of the group.
        owner: rank of the server.
        dtype: element type, as ``torch`` names it.
        pieces: the pieces, none of them empty.
        axis: axis along which the group's only variable is cut.
        width: elements per row of a row-wise shard, of which only touched rows travel; 0 for a dense shard.
        sparse: whether the gradient of a row-wise shard is a sparse tensor.
    """

    index: int
    group: str
    owner: int
    dtype: str
    pieces: tuple[Piece, ...]
    axis: int = 0
    width: int = 0
    sparse: bool = False

    @cached_property
    def numel(self) -> int:
        return sum(piece.numel for piece in self.pieces)

    @property
    def bytes(self) -> int:
        """Bytes of its parameters, and also of its dense gradient."""
        return self.numel * ITEMSIZE[self.dtype]

    @property
    def rows(self) -> int:
        """Number of rows of a row-wise shard; 0 for a dense one."""
        return self.numel // self.width if self.width else 0

    @property
    def first_row(self) -> int:
        """Row of the table at which this shard starts."""
        return self.pieces[0].start // self.width if self.width else 0


@dataclass(frozen=True)
class ServerLayout:
    """All shards of a model.

    Attributes:
        workers: number of worker ranks, which come first.
        servers: number of server-only ranks, which follow the workers.
        local_aggregation: whether the workers of a node push one sum together and pull once.
    """

    workers: int
    servers: int
    shards: tuple[Shard, ...]
    local_aggregation: bool = False

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """Ranks that keep at least one shard, ascending."""
        return tuple(sorted({shard.owner for shard in self.shards}))

    def of(self, owner: int) -> tuple[Shard, ...]:
        """The shards of one server, in layout order."""
        return tuple(shard for shard in self.shards if shard.owner == owner)

    @property
    def fingerprint(self) -> str:
        """Digest of the layout; equal on two ranks exactly if they cut and place parameters in the same way."""
        return digest(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ServerLayout:
        shards = (
            Shard(**{**shard, "pieces": tuple(Piece(**piece) for piece in shard["pieces"])}) for shard in data["shards"]
        )
        return cls(data["workers"], data["servers"], tuple(shards), data["local_aggregation"])


def server_layout(plan: SyncPlan, workload: Workload, source: str = "plan") -> ServerLayout:
    """Cut and place the parameters by the plan's groups.

    A ``parameter_server`` group goes to the ranks of its ``placement``, an ``all_reduce`` group in equal parts to all
    workers. Topologies are ignored: workers and servers communicate directly.

    Raises:
        PlanError: plan and workload do not fit each other, or servers that update parameters cannot run the plan.
    """
    if plan.consistency.mode not in MODES:
        raise PlanError(
            f"{source}: consistency.mode: '{plan.consistency.mode}' does not use parameter servers; allowed: "
            f"{', '.join(MODES)}"
        )
    check_variables(plan, workload, source)
    shards: list[Shard] = []
    for index, group in enumerate(plan.groups):
        variables = [workload.variable(name) for name in group.variables]
        try:
            _check_group(group, plan.groups[0])
            shards += _shards_of(group, variables, plan.world_size, len(shards))
        except ValueError as error:
            raise PlanError(f"{source}: groups[{index}] '{group.name}': {error}") from None
    return ServerLayout(plan.world_size, plan.servers, tuple(shards), plan.groups[0].local_aggregation)


def _check_group(group: Group, first: Group) -> None:
    if group.compressor.kind != "none":
        raise ValueError(
            f"compressor: servers take uncompressed gradients; only 'none' is allowed, not '{group.compressor.kind}'"
        )
    if group.local_aggregation != first.local_aggregation:
        raise ValueError(f"local_aggregation: differs from group '{first.name}'; it must be the same for all groups")


def _shards_of(group: Group, variables: Sequence[Variable], workers: int, number: int) -> Iterator[Shard]:
    dtypes = sorted({variable.dtype for variable in variables})
    if len(dtypes) > 1:
        raise ValueError(f"variables: a group must have one dtype, got {', '.join(dtypes)}")
    rows = row_count(group, variables)
    partition = group.partition
    if rows and partition:
        partition = partition.model_copy(update={"axis": 0})
    bounds = cut(partition, [variable.shape for variable in variables])
    width = bounds[-1] // rows if rows else 0
    for start, stop, owner in _ranges(group, bounds, width or _slice_length(partition, variables), workers):
        pieces = tuple(_pieces(variables, start, stop))
        if not pieces:
            continue
        yield Shard(
            index=number,
            group=group.name,
            owner=owner,
            dtype=dtypes[0],
            pieces=pieces,
            axis=(partition.axis if partition else None) or 0,
            width=width,
            sparse=variables[0].kind == "sparse",
        )
        number += 1


def _slice_length(partition: Partition | None, variables: Sequence[Variable]) -> int:
    """Elements of a slice along the axis of a cut: shards may be cut only between slices; 1 for a flat message."""
    axis = partition.axis if partition else None
    shape = variables[0].shape
    return variables[0].numel // shape[axis] if axis and shape[axis] else 1


def _ranges(group: Group, bounds: Sequence[int], unit: int, workers: int) -> Iterator[tuple[int, int, int]]:
    """Ranges of the message's elements and the rank that keeps each: start, stop, owner."""
    owners = group.placement or (0,) * group.shards
    for (start, stop), owner in zip(pairwise(bounds), owners, strict=True):
        if group.architecture == "parameter_server":
            yield start, stop, owner
            continue
        edges = even_bounds(0, (stop - start) // unit, workers)
        for rank, (lower, upper) in enumerate(pairwise(edges)):
            yield start + unit * lower, start + unit * upper, rank


def _pieces(variables: Sequence[Variable], start: int, stop: int) -> Iterator[Piece]:
    """The piece of each variable within ``[start, stop)`` of the message."""
    offset = 0
    for variable in variables:
        lower, upper = max(start, offset), min(stop, offset + variable.numel)
        if upper > lower:
            yield Piece(variable.name, lower - offset, upper - offset)
        offset += variable.numel
