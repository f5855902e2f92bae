"""What compressors remember, in checkpoints: gathered from all ranks when saved, dealt out when loaded."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from pydantic import ConfigDict
from torch import Tensor

from lightning_autosync.documents import Count, Record, checked, shortened, shown
from lightning_autosync.engine.memories import Memories, Memory
from lightning_autosync.engine.rendezvous import group_device
from lightning_autosync.errors import PlanError

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


class _Variable(Record):
    """What is remembered of a variable; tensors [ranks, ...]."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    compressor: dict[str, Any]
    tensors: dict[str, Tensor]


class _Entry(Record):
    """What `gather_state` returns."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    format: str
    world_size: Count
    variables: dict[str, _Variable]


def format_of(entry: Any) -> str:
    """The format of a checkpoint's entry.

    Raises:
        PlanError: it is none.
    """
    if not isinstance(entry, dict) or not isinstance(entry.get("format"), str):
        raise PlanError(f"checkpoint: {KEY}: format: missing; expected '{FORMAT}' or '{RELAXED_FORMAT}'")
    return str(entry["format"])


def own_state(entry: Any, group: dist.ProcessGroup | None = None) -> Memories:
    """This rank's part of a checkpoint's entry; empty if replicas did not march in step, and, with a warning, if it is
    for other ranks or versions.

    Raises:
        PlanError: it is no such entry; the message names the field.
    """
    found, world_size = format_of(entry), dist.get_world_size(group)
    if found == RELAXED_FORMAT:
        return {}
    if (found, entry.get("world_size")) != (FORMAT, world_size):
        rank_zero_warn(
            f"the checkpoint holds compressor state of {shown(entry.get('world_size'))} ranks ({shortened(found)}); "
            f"this job has {world_size} ({FORMAT}), so compressors start anew"
        )
        return {}
    variables, rank = checked(_Entry, entry, f"checkpoint: {KEY}", PlanError).variables, dist.get_rank(group)
    for name, memory in variables.items():
        for key, tensor in memory.tensors.items():
            if tensor.shape[:1] != (world_size,):
                raise PlanError(
                    f"checkpoint: {KEY}: variables.{name}.tensors.{key}: its shape is {list(tensor.shape)}; expected "
                    f"{world_size} ranks first"
                )
    return {
        name: Memory(memory.compressor, {key: tensor[rank] for key, tensor in memory.tensors.items()})
        for name, memory in variables.items()
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
