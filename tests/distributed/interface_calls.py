"""What ranks do in tests of several network interfaces."""

from __future__ import annotations

import hashlib
import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from training import subgroup

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine import Engine
from lightning_autosync.errors import AutoSyncError
from lightning_autosync.plan import SyncPlan, compile_plan
from lightning_autosync.ports import ADDRESSES
from lightning_autosync.workload import describe, variable_names

ELEMENTS = 50_001


class Vector(nn.Module):
    """One parameter, whose gradient is what the forward pass is given."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


def summed(plan: dict[str, Any], cluster: dict[str, Any], steps: int = 3, elements: int = ELEMENTS) -> list[Any] | None:
    """Digests of each step's mean gradient, and the bytes that this rank sent; None on ranks outside the cluster."""
    described, planned = ClusterSpec.from_dict(cluster), SyncPlan.from_dict(plan)
    group = subgroup(described.world_size)
    if group is None:
        return None
    module = Vector(elements)
    schedule = compile_plan(planned, describe(module), described)
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    engine = Engine(variable_names(module), schedule, group=group, cluster=described, timeout=60.0)
    try:
        found = []
        for _ in range(steps):
            module.zero_grad()
            module(torch.randn(elements, generator=generator)).backward()
            found.append(hashlib.sha256(module.weight.grad.numpy().tobytes()).hexdigest())
        return [found, engine.bytes_sent]
    finally:
        engine.close()


def rows_summed(plan: dict[str, Any], cluster: dict[str, Any]) -> float | None:
    """The largest gap between the mean of sparse gradients and that of dense ones by an all-reduce."""
    described, planned = ClusterSpec.from_dict(cluster), SyncPlan.from_dict(plan)
    group = subgroup(described.world_size)
    if group is None:
        return None
    torch.manual_seed(0)
    table = nn.Embedding(30, 4, sparse=True)
    engine = Engine(
        variable_names(table), compile_plan(planned, describe(table), described), group=group, cluster=described
    )
    try:
        chosen = torch.tensor([1, 7, 7, 20 + dist.get_rank(group)])
        table(chosen).pow(2).sum().backward()
        expected = torch.zeros(30, 4).index_add(0, chosen, 2 * table.weight.detach()[chosen])
        dist.all_reduce(expected, group=group)
        return float((table.weight.grad.to_dense() - expected / described.world_size).abs().max())
    finally:
        engine.close()


def refused(plan: dict[str, Any], cluster: dict[str, Any]) -> str | None:
    """The error of `summed`."""
    try:
        return None if summed(plan, cluster) is None else "no error"
    except AutoSyncError as error:
        return f"{type(error).__name__}: {error}"


def refused_with(addresses: list[str], plan: dict[str, Any], cluster: dict[str, Any]) -> str | None:
    """Like `refused`, with the environment variable by which each rank knows its addresses."""
    own = addresses[dist.get_rank()] if dist.get_rank() < len(addresses) else ""
    with mock.patch.dict(os.environ, {ADDRESSES: own}):
        return refused(plan, cluster)
