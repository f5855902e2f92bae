"""The check before training leaves optimizers as they were, in a job of one rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LinearLR

from lightning_autosync.errors import EquivalenceError
from lightning_autosync.hybrid import HybridPlan, LayerPlan
from lightning_autosync.hybrid.execution.equivalence import ComparedStep, Expectation, _gradient_faults, expect, verify
from lightning_autosync.hybrid.execution.live_mesh import LiveMesh
from lightning_autosync.hybrid.execution.reduction import GradientReduction
from lightning_autosync.hybrid.execution.split_model import SplitModel

PLAN = HybridPlan(
    mesh=(1,),
    layers=(LayerPlan(module="up", signature=("col",)), LayerPlan(module="down", signature=("row",))),
)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def compare(module: Model, optimizers: Callable[[], list[Optimizer]]) -> Expectation:
    """The expectation after the check, which accepts."""
    batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    split = SplitModel(module, PLAN, LiveMesh(PLAN))
    task = ComparedStep(lambda: module(batch).square().mean(), optimizers, batch)
    expected = expect(split, task)
    split.split()
    with closing(GradientReduction(split)) as reduction:
        verify(split, reduction, task, expected)
    return expected


def contents(optimizer: Optimizer) -> tuple[Any, Any]:
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return copy.deepcopy((groups, [(id(key), value) for key, value in optimizer.state.items()]))


@pytest.mark.parametrize("trained", [False, True])
def test_a_kept_optimizer_is_as_before(trained: bool) -> None:
    module = Model()
    optimizer = Adam(module.parameters(), lr=1e-2)
    if trained:
        module(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    LambdaLR(optimizer, lambda step: min(1.0, step / 3))  # starts at 0
    before = contents(optimizer)
    compare(module, lambda: [optimizer])
    groups, state = contents(optimizer)
    assert groups == before[0]
    torch.testing.assert_close(state, before[1], rtol=0, atol=0)


def test_schedules_of_a_kept_optimizer_start_once() -> None:
    module = Model()
    module.optimizer = Adam(module.parameters(), lr=1e-2)

    def configure() -> list[Optimizer]:
        LinearLR(module.optimizer, 0.1)  # multiplies the rate when it is made
        return [module.optimizer]

    compare(module, configure)
    assert module.optimizer.param_groups[0]["lr"] == 1e-2


def test_an_optimizer_that_a_method_makes_once_is_made_again() -> None:
    module = Model()

    def configure() -> list[Optimizer]:
        if not hasattr(module, "optimizer"):
            module.optimizer = Adam(module.parameters())
        return [module.optimizer]

    compare(module, configure)
    assert not hasattr(module, "optimizer")


class Counting(SGD):
    """Counts its steps for all parameters of a group together, as schedule-free optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            group["k"] = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1
            group["lr"] = 0.1 / group["k"]
        return super().step(closure)


def test_steps_that_are_counted_in_groups() -> None:
    module = Model()
    compare(module, lambda: [Counting(module.parameters())])


class Estimating(SGD):
    """Multiplies its rate by a number that it estimates from the gradients of all weights, as Prodigy does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.1 * group.setdefault("found", 1.0)
            group["found"] += sum(float(own.grad.norm()) for own in group["params"] if own.grad is not None)
        return super().step(closure)


def test_estimates_from_all_weights_are_refused() -> None:
    module = Model()
    with pytest.raises(EquivalenceError, match=r"the optimizer's steps of 'up\.weight' differ"):
        compare(module, lambda: [Estimating(module.parameters(), lr=0.1)])


def test_expected_gradients_are_not_copied_for_the_step() -> None:
    module = Model()
    expected = compare(module, lambda: [SGD(module.parameters(), lr=0.1)])
    assert not expected.gradients
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize(
    ("dtype", "narrowed", "error", "refused"),
    [
        (torch.float32, None, 1e-3, True),
        (torch.float32, torch.bfloat16, 1e-3, False),
        (torch.bfloat16, None, 1e-3, False),
        (torch.float32, torch.bfloat16, 1e-1, True),
    ],
)
def test_rounding_of_gradients_that_cancel(
    dtype: torch.dtype, narrowed: torch.dtype | None, error: float, refused: bool
) -> None:
    """The gradient of a bias before a batch norm is zero but for rounding, that of narrowed numbers, if there are."""
    parameters = {name: nn.Parameter(torch.zeros(1, dtype=dtype)) for name in ("weight", "bias")}
    parameters["weight"].grad, parameters["bias"].grad = (torch.full((1,), x, dtype=dtype) for x in (1.0, error))
    wanted = {"weight": torch.ones(1, dtype=dtype), "bias": torch.zeros(1, dtype=dtype)}
    expected = Expectation(gradients=wanted, norms={"weight": 1.0, "bias": 0.0}, narrowed=narrowed)
    split: Any = SimpleNamespace(parts={name: SimpleNamespace(parameter=own) for name, own in parameters.items()})
    assert bool(_gradient_faults(split, expected)) == refused
