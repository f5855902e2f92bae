"""`Schedule`: a plan compiled for one workload and one cluster.

The engine and the replay take the same Schedule, so what is predicted is what runs. Every synchronous
exchange of a range of elements is a reduce tree towards a root and a broadcast tree away from it, a
native collective of the backend, or a sum in memory that ranks of one machine share.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any

from lightning_autosync.documents import digest
from lightning_autosync.plan.spec import Compressor
from lightning_autosync.plan.trees import Tree


@dataclass(frozen=True)
class TreeTransfer:
    """Elements ``[start, stop)`` reduced along one tree and broadcast along another with the same root.

    ``segment`` elements at a time are pipelined.
    """

    start: int
    stop: int
    reduce: Tree
    broadcast: Tree
    segment: int

    def __post_init__(self) -> None:
        if self.reduce.root != self.broadcast.root:
            raise ValueError(
                f"the reduce tree ends at rank {self.reduce.root}, the broadcast tree starts at {self.broadcast.root}"
            )

    @property
    def root(self) -> int:
        return self.reduce.root


@dataclass(frozen=True)
class AllReduce:
    """Elements ``[start, stop)`` by the backend's own all-reduce."""

    start: int
    stop: int


@dataclass(frozen=True)
class _Ranges:
    """Ranges of elements, one after the other: the k-th is ``[bounds[k], bounds[k + 1])``."""

    bounds: tuple[int, ...]

    @property
    def start(self) -> int:
        return self.bounds[0]

    @property
    def stop(self) -> int:
        return self.bounds[-1]


@dataclass(frozen=True)
class AllToAll(_Ranges):
    """Rank ``owners[k]`` reduces the k-th range: one uneven all-to-all, a local sum, and one all-to-all back."""

    owners: tuple[int, ...]


@dataclass(frozen=True)
class SharedMemoryReduce(_Ranges):
    """Ranges in memory that all ranks map: rank ``r`` sums the r-th for all."""


@dataclass(frozen=True)
class TwoLevelAllReduce:
    """Elements ``[start, stop)`` by collectives in two levels: what NCCL does best between nodes of several devices.

    Inside each of ``places`` a reduce-scatter, between the ranks of equal seat an all-reduce, inside again an
    all-gather.
    """

    start: int
    stop: int
    places: tuple[tuple[int, ...], ...]


Transfer = TreeTransfer | AllReduce | AllToAll | SharedMemoryReduce | TwoLevelAllReduce


@dataclass(frozen=True)
class Round:
    """One exchange of ``length`` elements; PowerSGD takes two rounds, everything else one."""

    length: int
    transfers: tuple[Transfer, ...]

    def __post_init__(self) -> None:
        position = 0
        for number, transfer in enumerate(self.transfers):
            if transfer.start != position:
                fault = "overlaps the one before" if transfer.start < position else "leaves a gap"
                raise ValueError(f"transfers[{number}]: starts at element {transfer.start} and {fault} ({position})")
            position = transfer.stop
        if position != self.length:
            raise ValueError(f"transfers: end at element {position}, the message has {self.length}")


@dataclass(frozen=True)
class Message:
    """The variables of one group on the wire.

    Layout of a dense message: the variables one after the other, each with its ``axis`` moved to the front, then
    one element a variable that counts the ranks on which it got a gradient (so that parameters unused everywhere
    keep no gradient). A row-wise message holds one variable of ``rows`` rows; only touched rows travel, and the
    ranges of its transfers are counted in elements of the full table.

    Attributes:
        index: position in the schedule; collectives are launched in this order on every rank.
        name: the group's name.
        variables: names of the variables.
        numel: elements of all variables.
        dtype: element type of the gradients, as ``torch`` names it.
        axis: axis along which a lone variable is cut.
        rows: rows of a row-wise message; 0 for a dense one.
        compressor: what happens before the message travels.
        priority: higher goes first on trees.
        rounds: the exchanges, one after the other.
        sparse: whether the gradient of a row-wise message is a sparse tensor.
    """

    index: int
    name: str
    variables: tuple[str, ...]
    numel: int
    dtype: str
    axis: int
    rows: int
    compressor: Compressor
    priority: int
    rounds: tuple[Round, ...]
    sparse: bool = False

    @property
    def tail(self) -> int:
        """Elements behind the variables that count the ranks with a gradient."""
        return 0 if self.rows else len(self.variables)

    @property
    def collective(self) -> bool:
        """Whether the backend's collectives carry it, which every rank must launch in one order."""
        return not self.on_trees and not self.in_shared_memory

    @cached_property
    def on_trees(self) -> bool:
        """Whether it travels on this package's own connections."""
        return any(isinstance(transfer, TreeTransfer) for transfer in self.rounds[0].transfers)

    @cached_property
    def in_shared_memory(self) -> bool:
        """Whether its buffers lie in memory that all ranks map."""
        return any(isinstance(transfer, SharedMemoryReduce) for transfer in self.rounds[0].transfers)


@dataclass(frozen=True)
class Schedule:
    """All messages of a step, in launch order."""

    world_size: int
    messages: tuple[Message, ...]

    @cached_property
    def fingerprint(self) -> str:
        """Equal on two ranks exactly if they will exchange the same things."""
        return digest([_plain(message) for message in self.messages])

    def tree_edges(self) -> set[tuple[int, int]]:
        """Pairs of ranks (lower first) that exchange messages point to point."""
        edges: set[tuple[int, int]] = set()
        for message in self.messages:
            for transfer in (transfer for round in message.rounds for transfer in round.transfers):
                if isinstance(transfer, TreeTransfer):
                    for tree in (transfer.reduce, transfer.broadcast):
                        edges.update(
                            (min(rank, parent), max(rank, parent))
                            for rank, parent in enumerate(tree.parents)
                            if parent >= 0
                        )
        return edges


def _plain(value: Any) -> Any:
    """Plain data as of `dataclasses.asdict`, which is slow: it copies every rank of every tree."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        return [_plain(part) for part in value]
    return value.model_dump() if isinstance(value, Compressor) else value
