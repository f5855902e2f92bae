"""What the tests of latencies let their ranks do."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from lightning_autosync.hybrid.execution import collectives
from lightning_autosync.hybrid.execution.live_mesh import MeshLine

ROUNDS, CALLS = 3, 5


def seconds_of_collectives(elements: int) -> dict[str, float]:
    """Seconds of each collective of hybrid plans on ``elements`` float32 numbers a rank."""
    ranks = dist.get_world_size()
    line = MeshLine(dist.group.WORLD, ranks, None)
    whole, blocks = torch.ones(elements), torch.ones(ranks, elements // ranks)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: collectives.total(whole, line),
        "all_gather": lambda: collectives.gather(blocks[0], line),
        "reduce_scatter": lambda: collectives.scatter(blocks, line),
        "all_to_all": lambda: collectives.exchange(blocks, line),
    }
    return {name: _seconds(call) for name, call in calls.items()}


def _seconds(call: Callable[[], object]) -> float:
    """Of one of several calls in a row, since ranks do not leave a barrier at the same time; least of some rounds."""
    call()
    return min(_round(call) for _ in range(ROUNDS))


def _round(call: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS
