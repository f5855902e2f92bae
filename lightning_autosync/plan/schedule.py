"""`Schedule`: a plan compiled for one workload and one cluster.

The engine and the replay take the same Schedule, so the replay predicts what the engine runs. A range of elements is
exchanged in one of five ways: by a reduce tree and a broadcast tree with the same root, by exchanges between pairs of
ranks, by broadcasts of every rank's rows, by a native collective of the backend, or by a sum in memory that the ranks
of one machine share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

from lightning_autosync.documents import digest
from lightning_autosync.plan.pairwise import PairwiseReduce
from lightning_autosync.plan.spec import Compressor
from lightning_autosync.plan.trees import Tree


@dataclass(frozen=True)
class TreeTransfer:
    """Elements ``[start, stop)``, reduced along one tree and broadcast along another with the same root.

    The range is pipelined in pieces of ``segment`` elements.

    A ``second_root`` is a child of the root on both trees; -1 for none. The two exchange their sums of all other
    contributions at the same time, and both add them up. So a piece crosses the link between them once in each
    direction as before, but the way back need not wait for the way there. (Träff, "A doubly-pipelined, dual-root
    reduction-to-all algorithm", 2021.)
    """

    start: int
    stop: int
    reduce: Tree
    broadcast: Tree
    segment: int
    second_root: int = -1

    def __post_init__(self) -> None:
        if self.reduce.root != self.broadcast.root:
            raise ValueError(
                f"the reduce tree ends at rank {self.reduce.root}, but the broadcast tree starts at "
                f"{self.broadcast.root}"
            )
        if self.second_root < 0:
            return
        if {tree.parents[self.second_root] for tree in self.trees} != {self.root}:
            raise ValueError(f"second root {self.second_root} is not a child of root {self.root} on both trees")
        if self.reduce.interface != self.broadcast.interface:
            raise ValueError("trees with two roots must use the same interface of each node")

    @property
    def root(self) -> int:
        return self.reduce.root

    @property
    def trees(self) -> tuple[Tree, Tree]:
        return self.reduce, self.broadcast

    @cached_property
    def hops(self) -> int:
        """Hops of a piece on its longest way, up one tree and down the other; between two roots, both ways are one."""
        if self.second_root < 0:
            return self.reduce.depth + self.broadcast.depth
        rises, falls = (self._halves(tree) for tree in self.trees)
        return max(max(rise, 1 + other) + fall for rise, other, fall in zip(rises, reversed(rises), falls, strict=True))

    def _halves(self, tree: Tree) -> tuple[int, int]:
        """Hops between each of two roots and the farthest rank of its half of a tree."""
        others = [child for child in tree.children[self.root] if child != self.second_root]
        return max((1 + tree.heights[child] for child in others), default=0), tree.heights[self.second_root]

    def partner(self, rank: int) -> int:
        """The other root if ``rank`` is one of two; -1 otherwise."""
        if self.second_root < 0 or rank not in (self.root, self.second_root):
            return -1
        return self.second_root if rank == self.root else self.root


LEAST_BROADCAST = 8 * 1024
"""Bytes of a rank's rows for each further transfer over which it broadcasts them."""


@dataclass(frozen=True)
class RowBroadcast:
    """Touched rows of a table, which every rank sends to all others; each rank then adds them up in rank order.

    Elements ``[start, stop)`` stand for a share of each rank's touched rows, whatever their indices: ranks touch
    different numbers of rows, and popular rows often have close indices. The rows of rank ``r`` travel down
    ``trees[r]``, pipelined in pieces of ``segment`` elements.
    """

    start: int
    stop: int
    trees: tuple[Tree, ...]
    segment: int

    def __post_init__(self) -> None:
        for rank, tree in enumerate(self.trees):
            if tree.root != rank:
                raise ValueError(f"the tree of rank {rank}'s rows starts at rank {tree.root}")


@dataclass(frozen=True)
class AllReduce:
    """Elements ``[start, stop)``, summed by the backend's all-reduce."""

    start: int
    stop: int


@dataclass(frozen=True)
class _Ranges:
    """Consecutive ranges of elements; range k is ``[bounds[k], bounds[k + 1])``."""

    bounds: tuple[int, ...]

    @property
    def start(self) -> int:
        return self.bounds[0]

    @property
    def stop(self) -> int:
        return self.bounds[-1]


@dataclass(frozen=True)
class AllToAll(_Ranges):
    """Rank ``owners[k]`` reduces range k: an uneven all-to-all, a local sum, and an all-to-all back."""

    owners: tuple[int, ...]


@dataclass(frozen=True)
class SharedMemoryReduce(_Ranges):
    """Ranges in memory that all ranks map; rank ``r`` sums range r for all."""


@dataclass(frozen=True)
class TwoLevelAllReduce:
    """Elements ``[start, stop)``, summed by two-level collectives: NCCL's fastest way between multi-device nodes.

    A reduce-scatter runs inside each of ``places``, an all-reduce among the ranks with the same seat in every place,
    and an all-gather inside each place.
    """

    start: int
    stop: int
    places: tuple[tuple[int, ...], ...]


Transfer = TreeTransfer | PairwiseReduce | RowBroadcast | AllReduce | AllToAll | SharedMemoryReduce | TwoLevelAllReduce


@dataclass(frozen=True)
class Round:
    """One exchange of ``length`` elements. PowerSGD takes two rounds, all other codecs take one."""

    length: int
    transfers: tuple[Transfer, ...]

    def __post_init__(self) -> None:
        position = 0
        for number, transfer in enumerate(self.transfers):
            if transfer.start != position:
                fault = "overlap" if transfer.start < position else "gap"
                raise ValueError(f"transfers[{number}]: {fault}; start is {transfer.start}, expected {position}")
            position = transfer.stop
        if position != self.length:
            raise ValueError(f"transfers: end at element {position}, but the message has {self.length} elements")


@dataclass(frozen=True)
class Message:
    """The variables of one group on the wire.

    A dense message holds its variables one after the other, each with its ``axis`` moved to the front, and then one
    count per variable: the number of ranks on which it got a gradient. So a parameter that no rank used keeps no
    gradient. A row-wise message holds one variable with ``rows`` rows. Only its touched rows travel, but the ranges of
    its transfers count elements of the full table.

    Attributes:
        index: position in the schedule; collectives are launched in this order on every rank.
        name: the group's name.
        variables: names of the variables.
        numel: number of elements of all variables.
        dtype: element type of the gradients, as ``torch`` names it.
        axis: axis along which a single variable is cut.
        rows: number of rows of a row-wise message; 0 for a dense one.
        compressor: compression of the message.
        priority: priority on trees; higher goes first.
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

    def __post_init__(self) -> None:
        transfers = (transfer for each in self.rounds for transfer in each.transfers)
        mutual = any(
            isinstance(one, PairwiseReduce) or (isinstance(one, TreeTransfer) and one.second_root >= 0)
            for one in transfers
        )
        if mutual and (self.rows or self.compressor.kind != "none"):
            raise ValueError(f"message '{self.name}': rows and compressed messages need trees with one root")

    @property
    def tail(self) -> int:
        """Number of counts behind the variables."""
        return 0 if self.rows else len(self.variables)

    @property
    def collective(self) -> bool:
        """Whether the backend's collectives carry it; every rank must launch these in the same order."""
        return not self.on_trees and not self.in_shared_memory

    @cached_property
    def on_trees(self) -> bool:
        """Whether it travels on this package's own connections."""
        return any(isinstance(one, TreeTransfer | PairwiseReduce | RowBroadcast) for one in self.rounds[0].transfers)

    @cached_property
    def in_shared_memory(self) -> bool:
        """Whether its buffers are in memory that all ranks map."""
        return any(isinstance(transfer, SharedMemoryReduce) for transfer in self.rounds[0].transfers)

    @cached_property
    def waits_in_backward(self) -> bool:
        """Whether a rank waits for others at the end of the backward pass, although steps overlap.

        A later part of such a message needs what an earlier part brings from other ranks.
        """
        by_collectives = bool(self.rows) and self.collective
        exchanged = any(isinstance(transfer, AllToAll) for each in self.rounds for transfer in each.transfers)
        return len(self.rounds) > 1 or self.in_shared_memory or by_collectives or exchanged


@dataclass(frozen=True)
class Schedule:
    """All messages of a step, in launch order.

    Attributes:
        waits: as for `SyncPlan`.
    """

    world_size: int
    messages: tuple[Message, ...]
    waits: bool = False

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the messages; equal on two ranks exactly if they will make the same exchanges."""
        return digest([_plain(message) for message in self.messages])

    def tree_edges(self, interface: int | None = None) -> set[tuple[int, int]]:
        """Pairs of ranks (lower rank first) that exchange messages point to point, over one interface or over any."""
        return {
            (min(rank, parent), max(rank, parent))
            for used, parents in self._parents
            if interface in (None, used)
            for rank, parent in enumerate(parents)
            if parent >= 0
        }

    @cached_property
    def interfaces(self) -> tuple[int, ...]:
        """The interfaces over which messages are exchanged point to point, ascending."""
        return tuple(sorted({interface for interface, _ in self._parents}))

    @cached_property
    def _parents(self) -> set[tuple[int, tuple[int, ...]]]:
        """The interface and the parents of each tree; exchanges between pairs use the first interface."""
        found: set[tuple[int, tuple[int, ...]]] = set()
        for transfer in (one for message in self.messages for round in message.rounds for one in round.transfers):
            found |= {(tree.interface, tree.parents) for tree in trees_of(transfer)}
            if isinstance(transfer, PairwiseReduce):
                found |= {(0, swap.parents) for swap in transfer.swaps}
        return found


def first_parameters_first(schedule: Schedule, order: Sequence[str]) -> Schedule:
    """The schedule with priorities by which messages on trees leave in the order of their first parameter.

    A schedule whose plan sets priorities is returned as it is.

    Args:
        order: names of all its parameters, in the order in which the forward pass needs them.
    """
    if any(message.priority for message in schedule.messages):
        return schedule
    places = {name: place for place, name in enumerate(order)}
    return replace(
        schedule,
        messages=tuple(
            replace(message, priority=-min(places[name] for name in message.variables)) for message in schedule.messages
        ),
    )


def index_bytes(rows: int) -> int:
    """Bytes of the index of each touched row on the wire, for a table of so many ``rows``."""
    return next(size for size in (2, 4, 8) if rows <= 2 ** (8 * size))


def used_broadcasts(transfers: Sequence[RowBroadcast], size: float) -> list[tuple[RowBroadcast, float]]:
    """The transfers over which a rank broadcasts its rows, with the share of the rows that each carries.

    Each transfer costs a frame to every rank. So few rows travel over the first transfers only.

    Args:
        transfers: all transfers of a message.
        size: bytes of the rank's rows and their indices.
    """
    used = transfers[: max(1, math.ceil(size / LEAST_BROADCAST))]
    return [(one, (one.stop - one.start) / (used[-1].stop - used[0].start)) for one in used]


def trees_of(transfer: Transfer) -> tuple[Tree, ...]:
    """The trees of a transfer; none for those between pairs, of the backend and in shared memory."""
    return transfer.trees if isinstance(transfer, TreeTransfer | RowBroadcast) else ()


def _plain(value: Any) -> Any:
    """Plain data, as `dataclasses.asdict` makes it, but faster: `asdict` would copy every rank of every tree."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        return [_plain(part) for part in value]
    return value.model_dump() if isinstance(value, Compressor) else value
