"""Frozen parameters that code changes, as moving averages of trained ones, are equal after a barrier."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_group_average import together
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import PlanError
from lightning_autosync.plan import builders
from lightning_autosync.relaxed.factory import open_synchronizer
from lightning_autosync.relaxed.transport.mesh import Mesh
from lightning_autosync.workload import describe

RANKS = 3
SAMPLES = [1, 4, 7]
RULES: list[tuple[Any, dict[str, float], bool]] = [
    (SGD, {}, False),
    (SGD, {"momentum": 0.9}, True),
    (SGD, {"weight_decay": 0.1}, True),
    (AdamW, {}, True),
]
"""Optimizers, their options, and whether they move further by parts of a gradient."""


class Student(nn.Module):
    """A trained layer, an average of it, a layer that nothing changes, and complex tensors that code changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.average, self.fixed = (nn.Linear(3, 2) for _ in range(3))
        self.average.requires_grad_(False)
        self.fixed.requires_grad_(False)
        self.wave = nn.Parameter(torch.zeros(2, dtype=torch.complex64), requires_grad=False)
        self.register_buffer("spectrum", torch.zeros(2, dtype=torch.complex64))


def opened(mode: str, mesh: Any, module: nn.Module, optimizer: Any) -> Any:
    workload = describe(module)
    plan = builders.build(mode, workload, ClusterSpec.uniform(nodes=mesh.size, bandwidth="1 Gbit/s"))
    return open_synchronizer(plan, workload, module, mesh, optimizer=optimizer, timeout=20.0)


@pytest.mark.parametrize("mode", ["partial_reduce", "periodic", "asynchronous"])
def test_changed_ones_are_averaged_and_others_are_left_alone(mode: str) -> None:
    def play(mesh: Mesh) -> dict[str, Tensor]:
        module = Student()
        optimizer = SGD(module.layer.parameters(), lr=0.1)
        running = opened(mode, mesh, module, optimizer)
        running.start()
        fixed = module.fixed.weight.clone()
        for parameter in module.layer.parameters():
            parameter.grad = torch.full_like(parameter, mesh.rank + 1.0)
        running.step(optimizer, SAMPLES[mesh.rank])
        module.average.weight.data.fill_(mesh.rank + 1.0)
        for changed in (module.wave.data, module.spectrum):
            changed.fill_(complex(mesh.rank + 1.0, mesh.rank - 1.0))
        running.finish()
        running.drain()
        assert torch.equal(module.fixed.weight, fixed)
        running.close()
        return dict(module.state_dict())

    first, *others = together(RANKS, play)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
    mean = sum(count * (rank + 1) for rank, count in enumerate(SAMPLES)) / sum(SAMPLES)
    torch.testing.assert_close(first["average.weight"], torch.full((2, 3), mean))
    for name in ("wave", "spectrum"):
        torch.testing.assert_close(first[name], torch.full((2,), complex(mean, mean - 2.0)))


@pytest.mark.parametrize(("rule", "options", "further"), RULES)
def test_optimizers_that_move_further_by_parts_of_gradients_are_told_of(
    rule: Any, options: dict[str, float], further: bool
) -> None:
    def play(mesh: Mesh) -> None:
        module = nn.Linear(3, 2)
        running = opened("asynchronous", mesh, module, rule(module.parameters(), lr=0.1, **options))
        running.start()
        running.close()

    told = f"under mode 'asynchronous' servers make 2 steps of {rule.__name__} where DDP makes one"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.warns(UserWarning, match=told) if further else nullcontext():
            together(2, play)


def test_servers_refuse_complex_parameters() -> None:
    module = nn.Linear(3, 2, dtype=torch.complex64)
    with pytest.raises(PlanError, match="model: parameter 'weight' is complex, but servers keep real parameters only"):
        opened("asynchronous", SimpleNamespace(size=2), module, SGD(module.parameters(), lr=0.1))
