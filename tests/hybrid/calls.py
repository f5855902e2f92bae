"""What the workers of the pools do in tests of split models."""

from __future__ import annotations

from contextlib import closing, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from hybrid.faults import FAULTS, plan_of
from hybrid.models import CLASSES, MODELS, WIDTH, loss_of, make_batch
from hybrid.plans import draw_plan
from lightning_autosync.errors import AutoSyncError
from lightning_autosync.hybrid import HybridPlan, LayerPlan
from lightning_autosync.hybrid.execution.activation import bring_home
from lightning_autosync.hybrid.execution.equivalence import ComparedStep, expect, verify
from lightning_autosync.hybrid.execution.live_mesh import LiveMesh, mesh_groups
from lightning_autosync.hybrid.execution.reduction import GradientReduction, clip_gradients
from lightning_autosync.hybrid.execution.split_model import SplitModel

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda parameters: AdamW(parameters, lr=1e-2, weight_decay=0.1),
    "sgd": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
}
SAMPLES = 2


def make_model(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(5)
    module = MODELS[name]().to(dtype)
    module.train()
    return module


def equal_after_training(
    model: str, meshes: list[list[int]], seeds: list[int], steps: int = 4, optimizer: str = "adamw"
) -> dict[str, float]:
    """For each mesh and seed of a random plan, how far the weights end from those of one process, relatively."""
    found = {}
    for mesh in meshes:
        for seed in seeds:
            plan = draw_plan(make_model(model), mesh, seed)
            found[f"{model} {mesh} {seed}"] = distance(model, plan, steps, optimizer)
    return found


def distance(model: str, plan: HybridPlan, steps: int = 4, optimizer: str = "adamw") -> float:
    """How far the weights are from those of one process, relatively; steps of two batches each, clipped."""
    size = plan.world_size
    if dist.get_rank() >= size:
        mesh_groups(plan, range(size))
        return 0.0
    alone, shared = make_model(model), make_model(model)
    mesh = LiveMesh(plan, members=range(size))
    split = SplitModel(shared, plan, mesh)
    split.split()
    reduction = GradientReduction(split)
    optimizers = OPTIMIZERS[optimizer](alone.parameters()), OPTIMIZERS[optimizer](shared.parameters())
    for step in range(steps):
        batches = [make_batch(model, SAMPLES * size, 100 * step + part) for part in range(2)]
        for inputs, labels in batches:
            for own in range(size):
                rows = slice(SAMPLES * own, SAMPLES * (own + 1))
                (loss_of(alone, inputs[rows], labels[rows]) / size).backward()
        _step(optimizers[0], lambda: nn.utils.clip_grad_norm_(alone.parameters(), 0.5))
        own = dist.get_rank()
        rows = slice(SAMPLES * own, SAMPLES * (own + 1))
        for part, (inputs, labels) in enumerate(batches):
            reduction.enabled = part == 1
            with split.forward(inputs, labels):
                loss = bring_home(loss_of(shared, inputs[rows], labels[rows]))
            with reduction.backward():
                loss.backward()
        _step(optimizers[1], lambda: clip_gradients(split, shared.parameters(), 0.5))
    reduction.close()
    split.restore()
    return _far(alone, shared)


def _step(optimizer: Optimizer, clip: Any) -> None:
    clip()
    optimizer.step()
    optimizer.zero_grad()


def _far(one: nn.Module, other: nn.Module) -> float:
    """The largest distance of two weights, in units of the largest weight of their parameter."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max() / a.detach().abs().max().clamp(min=1e-6)) for a, b in pairs)


def check(model: str, fault: str | None = None, optimizer: str = "adamw") -> str:
    """What the check before training says of a plan on four ranks; empty if it accepts."""
    plan = plan_of(model)
    if dist.get_rank() >= 4:
        mesh_groups(plan, range(4))
        return ""
    module = make_model(model)
    rewrite = nullcontext() if fault is None else FAULTS[fault][1](module)
    inputs, labels = make_batch(model, 4 * SAMPLES, 3)
    rows = slice(SAMPLES * dist.get_rank(), SAMPLES * (dist.get_rank() + 1))
    task = ComparedStep(
        lambda: loss_of(module, inputs[rows], labels[rows]),
        lambda: [OPTIMIZERS[optimizer](module.parameters())],
        (inputs[rows], labels[rows]),
    )
    with rewrite:
        return _refusal(module, plan, task)


def _refusal(module: nn.Module, plan: HybridPlan, task: ComparedStep) -> str:
    """What the check before training says; empty if it accepts."""
    split = SplitModel(module, plan, LiveMesh(plan, members=range(4)))
    try:
        expected = expect(split, task)
        split.split()
        with closing(GradientReduction(split)) as reduction:
            verify(split, reduction, task, expected)
    except AutoSyncError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def check_failing(case: str) -> dict[str, Any]:
    """What the check before training says where some ranks fail, and how many weights a failure leaves changed."""
    plan = plan_of("dropping")
    if dist.get_rank() >= 4:
        mesh_groups(plan, range(4))
        return {}
    module, batch = make_model("dropping"), make_batch("dropping", SAMPLES, dist.get_rank())
    before = [parameter.detach().clone() for parameter in module.parameters()]

    def step() -> Any:
        loss = loss_of(module, *batch)
        if dist.get_rank() == 1 and case == "no loss":
            return None
        if dist.get_rank() == 1 and case == "error":
            raise ValueError("a sample of rank 1 is damaged")
        if case == "shape":
            torch.zeros(CLASSES * WIDTH).view(module.head.weight.shape)
        return loss

    def optimizers() -> list[Optimizer]:
        return [Failing(module.parameters(), lr=0.1) if case == "optimizer" else SGD(module.parameters(), lr=0.1)]

    told = _refusal(module, plan, ComparedStep(step, optimizers, batch))
    now = list(module.parameters())
    return {"told": told, "changed": sum(not torch.equal(a, b) for a, b in zip(before, now, strict=True))}


def check_kept() -> str:
    """What the check before training says where the optimizer has state from before the split."""
    plan = plan_of("dropping")
    if dist.get_rank() >= 4:
        mesh_groups(plan, range(4))
        return ""
    module, batch = make_model("dropping"), make_batch("dropping", SAMPLES, dist.get_rank())
    kept = AdamW(module.parameters(), lr=0.1)
    loss_of(module, *make_batch("dropping", SAMPLES, 0)).backward()
    kept.step()
    return _refusal(module, plan, ComparedStep(lambda: loss_of(module, *batch), lambda: [kept], batch))


class Unlike(nn.Module):
    """Has weights of several dtypes, some of which do not train."""

    def __init__(self, dtype: torch.dtype, trains: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32, dtype=dtype), nn.Linear(32, CLASSES, dtype=dtype)
        self.phase = nn.Parameter(torch.randn(8, dtype=dtype.to_complex()), requires_grad=trains)
        self.table = nn.Parameter(torch.arange(8, dtype=torch.uint8), requires_grad=False)
        self.register_buffer("turn", torch.ones(8, dtype=dtype.to_complex()))

    def forward(self, x: Any) -> Any:
        x = torch.view_as_real(x * self.phase * self.turn).sum(-1) + self.table / 8
        return self.down(torch.tanh(self.up(x)))


def check_dtypes(dtype: str, odd: int | None = None, trains: bool = False) -> str:
    """What the check before training says of weights of several dtypes; rank ``odd`` has another table.

    With ``trains`` the complex parameter is not frozen.
    """
    layers = (LayerPlan(module="up", signature=("col",)), LayerPlan(module="down", signature=("row",)))
    plan = HybridPlan(mesh=(4,), layers=(LayerPlan(module="", signature=("dp",)), *layers))
    if dist.get_rank() >= 4:
        mesh_groups(plan, range(4))
        return ""
    torch.manual_seed(5)
    real = getattr(torch, dtype)
    module, batch = Unlike(real, trains), make_batch("mlp", SAMPLES, dist.get_rank(), real)
    if dist.get_rank() == odd:
        module.table.data += 1
    task = ComparedStep(lambda: loss_of(module, *batch), lambda: [SGD(module.parameters(), lr=0.1)], batch)
    return _refusal(module, plan, task)


class Failing(SGD):
    """Fails on rank 1 after its step."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if dist.get_rank() == 1:
            raise TypeError("a closure is missing")


def with_checkpointing(model: str) -> float:
    """How far gradients with dropout are from the same ones where blocks run again in the backward pass."""
    plan = plan_of(model)
    if dist.get_rank() >= 4:
        mesh_groups(plan, range(4))
        return 0.0
    found = []
    for again in (False, True):
        module = make_model(model)
        module.checkpointing = again
        split = SplitModel(module, plan, LiveMesh(plan, members=range(4)), seed=7)
        split.split()
        inputs, labels = make_batch(model, SAMPLES, dist.get_rank())
        with split.forward(inputs, labels):
            loss = bring_home(loss_of(module, inputs, labels))
        loss.backward()
        found.append([parameter.grad for parameter in module.parameters()])
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


def in_inference_mode(model: str) -> float:
    """How far the loss in inference mode, in which Lightning validates under NCCL, is from that without gradients."""
    plan = plan_of(model)
    if dist.get_rank() >= 4:
        mesh_groups(plan, range(4))
        return 0.0
    module = make_model(model).eval()
    split = SplitModel(module, plan, LiveMesh(plan, members=range(4)))
    split.split()
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            inputs, labels = make_batch(model, SAMPLES, dist.get_rank())
            with split.forward(inputs, labels):
                found.append(float(bring_home(loss_of(module, inputs, labels))))
    return abs(found[0] - found[1])
