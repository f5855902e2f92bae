"""Functions that a calibration calls in workers.

All ranks call them at once, so that they share links and cores as they do in a step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_autosync.hybrid.execution import collectives
from lightning_autosync.hybrid.execution.live_mesh import LiveMesh, MeshLine
from lightning_autosync.hybrid.plan import HybridPlan, LayerPlan

_WORDS = 4
"""Bytes of a float32 element."""
_TINY_LAYERS = 20
_SUSTAINED = 0.2
"""Seconds for which a computation is repeated."""


def collective_seconds(
    mesh: Sequence[int], places: Sequence[int], sizes: Sequence[int], repetitions: int
) -> list[tuple[int, str, int, float]]:
    """Time collectives along each dimension of a mesh.

    Args:
        mesh: sizes of the dimensions.
        places: rank at each place of the mesh, in row-major order.
        sizes: approximate input bytes per rank.
        repetitions: number of repetitions of each collective.

    Returns:
        Rows of dimension, collective, input bytes of this rank, and median seconds.
    """
    layer = LayerPlan(module="", signature=tuple("dp" for _ in mesh))
    live = LiveMesh(HybridPlan(mesh=tuple(mesh), ranks=tuple(places), layers=(layer,)))
    found = []
    for dimension in live.dimensions:
        line = live.line(dimension)
        for size in sizes:
            block = max(1, size // _WORDS // line.size)
            value = torch.ones(line.size, block)
            for kind, call in _CALLS.items():
                seconds = _median(partial(call, value, line), repetitions)
                found.append((dimension, kind, _WORDS * value.numel(), seconds))
    return found


_CALLS: dict[str, Callable[[Tensor, MeshLine], Tensor]] = {
    "all_gather": collectives.gather,
    "reduce_scatter": collectives.scatter,
    "all_reduce": collectives.total,
    "all_to_all": collectives.exchange,
}


def compute_rates() -> dict[str, float]:
    """Rates of this rank while all ranks compute.

    Returns:
        ``flops`` (1/s), ``memory`` (bytes/s), ``operation`` (seconds of a tiny operation), ``layer`` (seconds of a
        layer beyond its operations) and ``update`` (bytes/s of parameters that SGD updates).
    """
    left, right = torch.randn(64, 1024), torch.randn(1024, 1024)
    product = _sustained(lambda: left @ right)
    large = torch.randn(1 << 21)
    moved = _sustained(lambda: large + 1.0)
    tiny = torch.randn(4)
    operation = _sustained(lambda: torch.relu(tiny))
    parameter = nn.Parameter(torch.zeros(1 << 21))
    parameter.grad = torch.zeros_like(parameter)
    update = _sustained(torch.optim.SGD([parameter], 0.01).step)
    return {
        "flops": 2 * 64 * 1024 * 1024 / product,
        "memory": 2 * _WORDS * large.numel() / moved,
        "operation": operation,
        "layer": max(0.0, _layer_seconds() - 3 * operation),
        "update": _WORDS * parameter.numel() / update,
    }


def _layer_seconds() -> float:
    """Seconds of the forward and backward pass of a layer with almost no computation."""
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(_TINY_LAYERS)))
    inputs = torch.randn(4, 8)

    def step() -> None:
        layers(inputs).sum().backward()

    return _sustained(step) / _TINY_LAYERS


def _sustained(call: Callable[[], object]) -> float:
    """Mean seconds of a call that all ranks repeat at once.

    `_SUSTAINED` exceeds the kernel's time slices, so that ranks that share a core cannot run one after the other.
    """
    call()
    dist.barrier()
    start, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < _SUSTAINED:
        call()
        count += 1
    return elapsed / count


def _median(call: Callable[[], object], repetitions: int) -> float:
    """Median seconds of a call; a barrier lets all ranks begin each call together."""
    seconds = []
    for number in range(repetitions + 1):
        dist.barrier()
        start = time.perf_counter()
        call()
        if number:  # the first call opens connections, so it does not count
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
