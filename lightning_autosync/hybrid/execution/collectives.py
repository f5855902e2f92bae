"""Collectives among the ranks along one dimension of a mesh, on the first axis of a tensor.

With gloo a reduce-scatter consists of an all-to-all and a local sum, because gloo's own ``reduce_scatter`` sends as
much as an all-reduce.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autosync.engine.collectives import all_gather_single, reduce_scatter_single
from lightning_autosync.hybrid.execution.live_mesh import MeshLine


def gather(tensor: Tensor, line: MeshLine) -> Tensor:
    """[ranks, ...] every rank's tensor [...]."""
    found = tensor.new_empty((line.size, *tensor.shape))
    all_gather_single(found.view(-1), tensor.contiguous().view(-1), group=line.group)
    return found if line.order is None else found[list(line.order)]


def scatter(blocks: Tensor, line: MeshLine) -> Tensor:
    """[...] the sum over ranks of their blocks for this rank, from ``blocks`` [ranks, ...] on each rank."""
    if dist.get_backend(line.group) != "gloo":
        found = blocks.new_empty(blocks.shape[1:])
        reduce_scatter_single(found.view(-1), _by_rank(blocks, line).contiguous().view(-1), group=line.group)
        return found
    received = exchange(blocks, line)
    # Sum narrow types in float32, because they would round after each summand.
    return received.sum(0, dtype=torch.float32).to(blocks.dtype) if blocks.dtype.itemsize < 4 else received.sum(0)


def exchange(blocks: Tensor, line: MeshLine) -> Tensor:
    """[ranks, ...] each rank's block for this rank, from ``blocks`` [ranks, ...] on each rank."""
    blocks = _by_rank(blocks, line).contiguous()
    found = torch.empty_like(blocks)
    dist.all_to_all_single(found, blocks, group=line.group)
    return found if line.order is None else found[list(line.order)]


def total(tensor: Tensor, line: MeshLine) -> Tensor:
    """[...] the sum over ranks, as a new tensor."""
    found = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(found, group=line.group)
    return found


def _by_rank(blocks: Tensor, line: MeshLine) -> Tensor:
    """The blocks in the order of the process group."""
    if line.order is None:
        return blocks
    return blocks[[line.order.index(rank) for rank in range(line.size)]]
