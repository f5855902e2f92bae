"""Making replicas equal: tensors of rank 0, broadcast to all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_autosync.documents import digest
from lightning_autosync.workload import shared_buffers, shared_parameters

CHUNK = 256 * 1024 * 1024
"""Bytes, about, that are flattened at a time."""


def broadcast_tensors(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Overwrite ``tensors`` by those of the group's first rank, as bytes, whatever their dtypes.

    Names, shapes and dtypes must be the same on all ranks (see `structure_digest`).
    """
    source = dist.get_global_rank(group, 0) if group is not None else 0
    for chunk in _chunks(tensors):
        flat = torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in chunk])
        dist.broadcast(flat, src=source, group=group)
        if dist.get_rank(group) != 0:
            _scatter(flat, chunk)


def structure_digest(module: nn.Module) -> str:
    """Equal on two ranks if parameters and buffers have the same names, shapes, dtypes and trainability.

    Strides of parameters count too: gradients travel in the order in which they lie in memory.
    """
    parameters = [[name, *_form(tensor), list(tensor.stride())] for name, tensor in shared_parameters(module)]
    return digest([*parameters, *([name, *_form(tensor)] for name, tensor in shared_buffers(module))])


class BufferBroadcast:
    """Buffers follow rank 0, as with DDP: in the first forward pass after one that is for a synchronized backward pass.

    In between ranks may differ, as the running statistics of normalization layers do.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self._module = module
        self._group = group
        self._due = True

    def before_forward(self, synchronizes: bool) -> None:
        """Call before each forward pass, of training and evaluation alike.

        Args:
            synchronizes: whether a synchronized backward pass may follow.
        """
        if self._due:
            # Looked up each time, for modules may replace their buffers. `data` keeps autograd out: a graph that
            # saved running statistics never reads them in training mode, and must not see them as modified.
            broadcast_tensors([buffer.data for _, buffer in shared_buffers(self._module)], self._group)
        self._due = synchronizes


def _form(tensor: Tensor) -> list[Any]:
    return [list(tensor.shape), str(tensor.dtype), tensor.requires_grad]


def _chunks(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one device, large items first so that each starts at a multiple of its item size."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_device.setdefault(tensor.device, []).append(tensor)
    for members in by_device.values():
        chunk: list[Tensor] = []
        size = 0
        for tensor in sorted(members, key=lambda member: -member.element_size()):
            chunk.append(tensor)
            size += tensor.numel() * tensor.element_size()
            if size >= CHUNK:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk


def _scatter(flat: Tensor, tensors: list[Tensor]) -> None:
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    with torch.no_grad():
        for tensor, part in zip(tensors, flat.split(sizes), strict=True):
            tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
