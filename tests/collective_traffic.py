"""Measures the traffic of a program without a network: logs its collectives in a job with pretended ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_autosync.hybrid.conversions import Collective, sent

_OPERATIONS: dict[str, tuple[Collective, int]] = {
    # operation of torch: kind, index of the argument with a rank's contribution
    "allreduce_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 1),
    "allgather_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "alltoall_": ("all_to_all", 1),
    "all_reduce": ("all_reduce", 0),
    "all_gather_into_tensor": ("all_gather", 0),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "all_to_all_single": ("all_to_all", 0),
}
_SILENT = frozenset({"wait_tensor", "barrier", "monitored_barrier_"})


@dataclass(frozen=True)
class Logged:
    """A collective.

    Attributes:
        collective: kind of the collective.
        ranks: ranks that take part.
        payload: bytes that each rank contributes.
    """

    collective: Collective
    ranks: tuple[int, ...]
    payload: int

    @property
    def sent(self) -> float:
        """Bytes that each rank sends with a bandwidth-optimal algorithm."""
        return self.payload * sent(self.collective, len(self.ranks))


class TrafficLog(TorchDispatchMode):
    """Logs the collectives that are called within its block.

    Attributes:
        collectives: the collectives, in their order.

    Raises:
        NotImplementedError: a collective is unknown.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Logged] = []

    @property
    def bytes(self) -> float:
        """Bytes that this rank sends."""
        return sum(logged.sent for logged in self.collectives)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func.namespace, func._schema.name.rpartition("::")[2]
        if namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd") and name not in _SILENT:
            if name not in _OPERATIONS:
                raise NotImplementedError(
                    f"{namespace}::{name} is not a known collective, so its traffic cannot be counted"
                )
            kind, place = _OPERATIONS[name]
            payload = sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(args[place]) if _is_tensor(leaf))
            self.collectives.append(Logged(kind, _ranks(args), payload))
        return func(*args, **(kwargs or {}))


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _ranks(arguments: Any) -> tuple[int, ...]:
    """The ranks of the process group among the arguments of a collective."""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject):
            try:
                group = dist.ProcessGroup.unbox(argument)
            except (RuntimeError, TypeError):
                continue  # the operation of a reduction, not a process group
            return tuple(dist.get_process_group_ranks(group))
        if isinstance(argument, str) and argument not in ("sum", "avg", "max", "min", "product"):
            resolve: Any = dist.distributed_c10d._resolve_process_group
            return tuple(dist.get_process_group_ranks(resolve(argument)))
    raise NotImplementedError("a collective has no process group among its arguments")


@contextmanager
def pretended_job(world_size: int, rank: int = 0) -> Iterator[None]:
    """Within the block this process is a rank of a job without other processes; collectives do not change data.

    Args:
        world_size: number of ranks of the job.
        rank: rank of this process.
    """
    # This import registers the backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def words_at_least(rows: float, inner: float, columns: float, ranks: int) -> float:
    """Lower bound on the elements that some rank sends or receives in a matrix product on ``ranks`` ranks.

    Each rank does ``rows x inner x columns / ranks`` multiplications, so it touches at least three faces of a box with
    that volume. It must receive the elements that it does not own (Irony, Toledo and Tiskin, 2004; Al Daas et al.,
    2022). Each rank owns an equal share of the three matrices.
    """
    volume = rows * inner * columns / ranks
    longest, middle, shortest = sorted((rows, inner, columns), reverse=True)
    owned = (rows * inner + inner * columns + rows * columns) / ranks
    if ranks <= longest / middle:
        faces = volume / shortest + volume / middle + middle * shortest
    elif ranks <= longest * middle / shortest**2:
        faces = volume / shortest + 2 * math.sqrt(volume * shortest)
    else:
        faces = 3 * volume ** (2 / 3)
    return max(0.0, faces - owned)
