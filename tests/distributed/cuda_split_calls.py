"""What ranks do in tests of split models on accelerators; each function runs on the CPU too."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from cuda_training_calls import sgd, told
from hybrid.models import MODELS, loss_of, make_batch
from hybrid.plans import draw_plan
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_autosync.hybrid.execution.activation import bring_home
from lightning_autosync.hybrid.execution.equivalence import ComparedStep, expect, verify
from lightning_autosync.hybrid.execution.live_mesh import LiveMesh
from lightning_autosync.hybrid.execution.reduction import GradientReduction, clip_gradients
from lightning_autosync.hybrid.execution.split_model import SplitModel

PART = 2
"""Samples of a rank in a batch."""


def split_distances(device: str, models: list[str], meshes: list[list[int]], seeds: list[int]) -> dict[str, float]:
    """For each model, mesh and seed of a random plan, how far the weights end from those of one process on the CPU."""
    found = {}
    for model in models:
        for mesh in meshes:
            for seed in seeds:
                found[f"{model} {mesh} {seed}"] = _split_distance(device, model, mesh, seed)
    return found


def _made(model: str) -> nn.Module:
    torch.manual_seed(5)
    module = MODELS[model.removesuffix(" again")]().double().train()
    if model.endswith(" again"):  # parts of the forward pass run again in autograd's thread
        module.checkpointing = True
    return module


def _split_distance(device: str, model: str, mesh: list[int], seed: int) -> float:
    kind, size, own = model.removesuffix(" again"), dist.get_world_size(), dist.get_rank()
    single, shared = _made(model), _made(model).to(device)
    plan = draw_plan(single, mesh, seed)
    split = SplitModel(shared, plan, LiveMesh(plan))
    split.split()
    reduction = GradientReduction(split)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2) for module in (single, shared)]
    for step in range(3):
        for part in range(2):
            inputs, labels = make_batch(kind, PART * size, 100 * step + part)
            rows = [slice(PART * rank, PART * (rank + 1)) for rank in range(size)]
            for each in rows:
                (loss_of(single, inputs[each], labels[each]) / size).backward()
            inputs, labels = inputs[rows[own]].to(device), labels[rows[own]].to(device)
            reduction.enabled = part == 1
            with split.forward(inputs, labels):
                loss = bring_home(loss_of(shared, inputs, labels))
            with reduction.backward():
                loss.backward()
        nn.utils.clip_grad_norm_(single.parameters(), 0.5)
        clip_gradients(split, shared.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    reduction.close()
    split.restore()
    shared.cpu()
    pairs = zip(single.parameters(), shared.parameters(), strict=True)
    return max(float((a - b).detach().abs().max() / a.detach().abs().max().clamp(min=1e-6)) for a, b in pairs)


class Mixed(nn.Module):
    """Multiplies a split value by whole numbers that are on the CPU, and has a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.second.weight = nn.Parameter(torch.randn(16, 8).t())

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(inputs)) * torch.tensor(2) * torch.tensor(True))


def compared(device: str) -> dict[str, Any]:
    """What the comparison before training says of a model whose values meet numbers on the CPU; "" if it accepts."""
    torch.manual_seed(5)
    module, size = Mixed().double().to(device), dist.get_world_size()
    plan = draw_plan(module, [size], 1)
    columns = tuple(layer.model_copy(update={"signature": ("col",), "output": None}) for layer in plan.layers)
    plan = plan.model_copy(update={"layers": columns})
    inputs, labels = (part.to(device) for part in make_batch("mlp", PART * size, dist.get_rank()))
    task = ComparedStep(lambda: F.cross_entropy(module(inputs), labels), lambda: [sgd(module)], (inputs, labels))
    split = SplitModel(module, plan, LiveMesh(plan))
    expected = expect(split, task)
    split.split()
    reduction = GradientReduction(split)
    said = told(lambda: verify(split, reduction, task, expected))
    idle = float(clip_gradients(split, [], 1.0))
    reduction.close()
    split.restore()
    return {"said": said, "norm of nothing": idle}
