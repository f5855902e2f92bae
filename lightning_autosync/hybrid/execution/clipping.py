"""Gradient clipping by the total norm for split models."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_autosync.engine.collectives import group_device
from lightning_autosync.hybrid.execution.split_model import SplitModel


def gradient_norm(split: SplitModel, parameters: Iterable[nn.Parameter]) -> Tensor:
    """[] the Euclidean norm of the whole gradient of parameters that may be cut; collective.

    Args:
        parameters: the same parameters on all ranks. Those that are not the model's are assumed to be equal on all
            ranks.
    """
    parts = {part.parameter: part for part in split.parts.values()}
    found = [parameter for parameter in parameters if parameter.grad is not None]
    group = split.mesh.group(split.mesh.dimensions)
    device = found[0].grad.device if found else group_device(group)  # type: ignore[union-attr]
    total = torch.zeros((), dtype=torch.float64, device=device)
    if found:
        norms = torch.stack(torch._foreach_norm([parameter.grad for parameter in found]))  # type: ignore[misc]
        # Weight each part by 1 / (number of ranks that have it), so that it counts once in the sum over all ranks.
        pieces = [parts[parameter].shard.pieces if parameter in parts else 1 for parameter in found]
        shares = [count / split.plan.world_size for count in pieces]
        total += (norms.double().square() * torch.tensor(shares, dtype=torch.float64, device=device)).sum()
    dist.all_reduce(total, group=group)
    return total.sqrt()


def clip_gradients(split: SplitModel, parameters: Iterable[nn.Parameter], most: float) -> Tensor:
    """Scale gradients so that their norm is at most ``most``, like ``torch.nn.utils.clip_grad_norm_``; collective.

    Returns:
        [] the norm before clipping.
    """
    found = [parameter for parameter in parameters if parameter.grad is not None]
    norm = gradient_norm(split, found)
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)
    if found:
        gradients = [parameter.grad for parameter in found]
        torch._foreach_mul_(gradients, float(factor))  # type: ignore[arg-type]
    return norm
