"""Models between whose split layers ranks do unlike things, and what the workers of the pools do with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_autosync.errors import AutoSyncError
from lightning_autosync.hybrid import HybridPlan, LayerPlan
from lightning_autosync.hybrid.execution.activation import bring_home
from lightning_autosync.hybrid.execution.live_mesh import LiveMesh, mesh_groups
from lightning_autosync.hybrid.execution.reduction import GradientReduction, ReductionSettings
from lightning_autosync.hybrid.execution.split_model import SplitModel

INPUTS, HIDDEN, OUTPUTS = 8, 32, 4


class Between(nn.Module):
    """Columns, something that depends on the input, then rows."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.up, self.other = nn.Linear(INPUTS, HIDDEN), nn.Linear(INPUTS, HIDDEN)
        self.common = nn.Linear(INPUTS, HIDDEN)
        self.table = nn.Embedding(INPUTS, HIDDEN)
        self.down = nn.Linear(HIDDEN, OUTPUTS)
        self.register_buffer("pattern", torch.arange(HIDDEN) % 3)
        self.register_buffer("scale", torch.linspace(1.0, 2.0, HIDDEN))
        self.between = BETWEEN[between]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.between(self, self.up(x), x)))


def _either(module: Between, value: Tensor, x: Tensor) -> Tensor:
    return value + (module.other if x.sum() > 0 else module.up)(x)


def _running(module: Between, value: Tensor, x: Tensor) -> Tensor:
    module.scale.mul_(0.9).add_(x.abs().mean(), alpha=0.1)
    return value / module.scale


def _sometimes(module: Between, value: Tensor, x: Tensor) -> Tensor:
    value = value + module.scale
    if x.sum() > 0:
        module.scale.mul_(1.5)
    return value * module.scale


class Bent(torch.autograd.Function):
    """The value, whose gradient is another than it should be."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _bend(gradients[0])


def _bend(gradient: Tensor) -> Tensor:
    """Depends on the scale of a gradient, and on the places of its elements."""
    return gradient * gradient.abs() * torch.arange(1, gradient.numel() + 1).view(gradient.shape)


def _hooked(module: Between, value: Tensor, x: Tensor) -> Tensor:
    made = torch.tanh(value)
    value.register_hook(_bend)
    return made + value


def _own(x: Tensor) -> int:
    """A number that is 1 on rank 1 unless samples are alike."""
    return int(x.sum() > 0)


def _twice(value: Tensor) -> Tensor:
    return torch.cat([value[:, None], -value[:, None]], 1)


def _attend(value: Tensor, scale: float) -> Tensor:
    heads = value.view(len(value), 1, 4, HIDDEN // 4).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, scale=scale).transpose(1, 2).reshape(value.shape)


BETWEEN: dict[str, Callable[[Between, Tensor, Tensor], Tensor]] = {
    "count": lambda module, value, x: value / (x > -1).sum(),
    "mask": lambda module, value, x: value.masked_fill((x > 0).all(0).repeat(HIDDEN // INPUTS), 0.0),
    "own mask": lambda module, value, x: value.masked_fill(module.pattern == 1, 0.0),
    "running buffer": _running,
    "sometimes changed": _sometimes,
    "part of a buffer": lambda module, value, x: value * module.scale[len(x[x > 0]) :][:1],
    "own backward": lambda module, value, x: Bent.apply(value),
    "hook": _hooked,
    "number": lambda module, value, x: value * float((x > 0).sum()),
    "NumPy's number": lambda module, value, x: value * np.float32((x > 0).sum()),
    "index": lambda module, value, x: _twice(value)[:, _own(x)],
    "slice": lambda module, value, x: _twice(value)[:, _own(x) :][:, 0],
    "sizes": lambda module, value, x: _twice(value).split([1 + _own(x), 1 - _own(x)], 1)[0][:, -1],
    "scale": lambda module, value, x: _attend(value, 1.0 + _own(x)),
    "layer": _either,
    "input without samples": lambda module, value, x: value + module.common(x.mean(0)),
    "index without samples": lambda module, value, x: value + module.table((x[0] > 0).sum().clamp(max=7)),
}
PLAN = HybridPlan(
    mesh=(2,),
    layers=(
        LayerPlan(module="up", signature=("col",)),
        LayerPlan(module="other", signature=("col",)),
        LayerPlan(module="common", signature=("col",), batch_axis=None),
        LayerPlan(module="table", signature=("col",), batch_axis=None),
        LayerPlan(module="down", signature=("row",), output=("batch",)),
    ),
)


def make_split(module: nn.Module) -> SplitModel:
    split = SplitModel(module, PLAN, LiveMesh(PLAN, members=range(2)))
    split.split()
    return split


def make_inputs(alike: bool) -> Tensor:
    """Samples of a rank, of which those of rank 1 have a larger sum unless they are alike."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, INPUTS, generator=generator, dtype=torch.float64)
    return inputs.abs() if dist.get_rank() and not alike else -inputs.abs() + 0.1


def distance(between: str) -> float:
    """How far a rank's output and its parts of the gradients are from those under data parallelism."""
    if dist.get_rank() >= 2:
        mesh_groups(PLAN, range(2))
        return 0.0
    torch.manual_seed(1)
    module, inputs = Between(between).double(), make_inputs(alike=False)
    alone = copy.deepcopy(module)
    split = make_split(module)
    expected = alone(inputs)
    expected.square().mean().backward()
    reduction = GradientReduction(split)
    with split.forward(inputs):
        found = bring_home(module(inputs))
    with reduction.backward():
        found.square().mean().backward()
    reduction.close()
    group = split.mesh.group((0,))
    far = [float((found - expected).detach().abs().max())]
    for name, parameter in alone.named_parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
            own = split.parts[name].parameter.grad
            assert own is not None
            far.append(float((own - split.parts[name].shard.take(parameter.grad / 2)).abs().max()))
    return max(far)


def gradients_of_a_value() -> float:
    """How far gradients of a split value are from those under data parallelism."""
    if dist.get_rank() >= 2:
        mesh_groups(PLAN, range(2))
        return 0.0
    torch.manual_seed(1)
    module, inputs = Between("own mask").double(), make_inputs(alike=False)
    expected = _both_gradients(module, inputs)
    with make_split(module).forward(inputs):
        found = _both_gradients(module, inputs)
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


def _both_gradients(module: Between, inputs: Tensor) -> list[Tensor]:
    value = module.up(inputs)
    value.retain_grad()
    loss = bring_home(module.down(torch.tanh(value))).square().mean()
    (asked,) = torch.autograd.grad(loss, value, retain_graph=True)
    for _ in range(2):
        loss.backward(retain_graph=True)
    assert value.grad is not None
    return [asked, value.grad]


def changed_copy() -> str:
    """What ranks are told in the second pass when rank 1 changes its copy of a bias after the first."""
    if dist.get_rank() >= 2:
        mesh_groups(PLAN, range(2))
        return ""
    torch.manual_seed(1)
    module, inputs = Between("own mask").double(), make_inputs(alike=False)
    split = make_split(module)
    reduction = GradientReduction(split, ReductionSettings(check_replicas=1))
    try:
        for _ in range(2):
            with split.forward(inputs):
                found = bring_home(module(inputs))
            with reduction.backward():
                found.square().mean().backward()
            module.down.bias.data += dist.get_rank()
    except AutoSyncError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def late_change() -> str:
    """What ranks are told in a third pass when rank 1 changes a buffer between two uses in the second one."""
    if dist.get_rank() >= 2:
        mesh_groups(PLAN, range(2))
        return ""
    torch.manual_seed(1)
    module = Between("sometimes changed").double()
    split = make_split(module)
    try:
        for number in range(3):
            inputs = make_inputs(alike=number == 0)
            with split.forward(inputs):
                bring_home(module(inputs))
    except AutoSyncError as error:
        return f"{number}: {error}"
    return ""


def second_pass(between: str, alike: bool) -> str:
    """What ranks are told in a second pass; empty if nothing."""
    if dist.get_rank() >= 2:
        mesh_groups(PLAN, range(2))
        return ""
    torch.manual_seed(1)
    module = Between(between).double()
    split = make_split(module)
    for _ in range(2):
        inputs = make_inputs(alike)
        try:
            with split.forward(inputs):
                bring_home(module(inputs))
        except AutoSyncError as error:
            return f"{type(error).__name__}: {error}"
    return ""
