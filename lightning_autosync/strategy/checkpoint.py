"""What compressors remember, in checkpoints: gathered from all ranks when saved, dealt out when loaded."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_autosync.runtime.rendezvous import group_device

KEY = "autosync"
"""The checkpoint's entry."""
FORMAT = "autosync-state/1"

State = dict[str, dict[str, Tensor]]


def gather_state(state: State, plan: str, group: dist.ProcessGroup | None = None) -> dict[str, Any] | None:
    """The checkpoint's entry on rank 0, None elsewhere and where there is nothing to remember; collective.

    Args:
        state: this rank's, by message and key; names and shapes are the same on all ranks.
        plan: fingerprint of the plan.
        group: the ranks; None is the default group.

    Returns:
        A mapping of plain values and tensors, readable with ``torch.load(weights_only=True)``; tensors have
        the ranks along a new first axis.
    """
    gathered = {
        message: {key: _gather(tensor, group) for key, tensor in sorted(tensors.items())}
        for message, tensors in sorted(state.items())
    }
    if not gathered or dist.get_rank(group) != 0:
        return None
    return {"format": FORMAT, "plan": plan, "world_size": dist.get_world_size(group), "state": gathered}


def own_state(entry: dict[str, Any], plan: str, group: dist.ProcessGroup | None = None) -> State | None:
    """This rank's part of a checkpoint's entry; None, with a warning, if it does not fit here."""
    world_size = dist.get_world_size(group)
    found = (entry.get("format"), entry.get("plan"), entry.get("world_size"))
    if found != (FORMAT, plan, world_size):
        rank_zero_warn(
            f"the checkpoint holds compressor state of plan {found[1]} on {found[2]} ranks ({found[0]}); "
            f"this is plan {plan} on {world_size} ranks ({FORMAT}), so compressors start anew"
        )
        return None
    rank = dist.get_rank(group)
    return {
        message: {key: tensor[rank] for key, tensor in tensors.items()} for message, tensors in entry["state"].items()
    }


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
