"""What compressors remember, in checkpoints: gathered from all ranks when saved, dealt out when loaded."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_autosync.runtime.memories import Memories, Memory
from lightning_autosync.runtime.rendezvous import group_device

KEY = "autosync"
"""The checkpoint's entry."""
FORMAT = "autosync-state/2"
RELAXED_FORMAT = "autosync-relaxed/2"
"""Of the entry that replicas make which do not march in step; compressors remember nothing there."""


def gather_state(state: Memories, group: dist.ProcessGroup | None = None) -> dict[str, Any] | None:
    """The checkpoint's entry on rank 0, None elsewhere and where there is nothing to remember; collective.

    Args:
        state: this rank's, by variable; names and shapes are the same on all ranks.
        group: the ranks; None is the default group.

    Returns:
        A mapping of plain values and tensors, readable with ``torch.load(weights_only=True)``; tensors have
        the ranks along a new first axis.
    """
    gathered = {
        name: {
            "compressor": memory.compressor,
            "tensors": {key: _gather(tensor, group) for key, tensor in sorted(memory.tensors.items())},
        }
        for name, memory in sorted(state.items())
    }
    if not gathered or dist.get_rank(group) != 0:
        return None
    return {"format": FORMAT, "world_size": dist.get_world_size(group), "variables": gathered}


def own_state(entry: dict[str, Any], group: dist.ProcessGroup | None = None) -> Memories:
    """This rank's part of a checkpoint's entry; empty if replicas did not march in step, and, with a warning, if it is
    for other ranks or versions.
    """
    if entry.get("format") == RELAXED_FORMAT:
        return {}
    world_size = dist.get_world_size(group)
    found = (entry.get("format"), entry.get("world_size"))
    if found != (FORMAT, world_size):
        rank_zero_warn(
            f"the checkpoint holds compressor state of {found[1]} ranks ({found[0]}); this job has {world_size} "
            f"({FORMAT}), so compressors start anew"
        )
        return {}
    rank = dist.get_rank(group)
    return {
        name: Memory(memory["compressor"], {key: tensor[rank] for key, tensor in memory["tensors"].items()})
        for name, memory in entry["variables"].items()
    }


def warn_left_out(names: list[str], occasion: str) -> None:
    """Tell once which variables start with an empty compressor memory; nothing if there are none."""
    if names:
        rank_zero_warn(
            f"{occasion}: what compressors remembered of {', '.join(names)} is dropped, for these are in no message "
            "of the plan or have another compressor there"
        )


def _gather(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor | None:
    """[ranks, ...] in rank 0's host memory, None elsewhere; moved as bytes, for backends do not know every dtype."""
    flat = tensor.detach().to(group_device(group)).reshape(-1).view(torch.uint8)
    first = dist.get_global_rank(group, 0) if group is not None else 0
    if dist.get_rank(group) != 0:
        dist.gather(flat, dst=first, group=group)
        return None
    parts = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    dist.gather(flat, parts, dst=first, group=group)
    return torch.stack(parts).cpu().view(tensor.dtype).view(len(parts), *tensor.shape)
