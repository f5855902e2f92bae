"""A split model refuses parameters that were not there when it was split."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from collective_traffic import pretended_job
from torch import nn

from lightning_autosync.errors import ExchangeError
from lightning_autosync.hybrid import HybridPlan, LayerPlan
from lightning_autosync.hybrid.execution.live_mesh import LiveMesh
from lightning_autosync.hybrid.execution.reduction import GradientReduction
from lightning_autosync.hybrid.execution.split_model import SplitModel


def _replace(module: nn.Module) -> None:
    module.weight = nn.Parameter(torch.ones(4, 8))


def _add(module: nn.Module) -> None:
    module.scale = nn.Parameter(torch.ones(4))


def _widen(module: nn.Module) -> None:
    assert isinstance(module.bias, nn.Parameter)
    module.bias.data = module.bias.data.double()


@pytest.mark.parametrize(("change", "name"), [(_replace, "weight"), (_add, "scale"), (_widen, "bias")])
def test_other_parameters_are_refused(split: SplitModel, change: Callable[[nn.Module], None], name: str) -> None:
    reduction = GradientReduction(split)
    change(split.module)
    with pytest.raises(ExchangeError, match=f"parameter '{name}' was added, removed or replaced"), reduction.backward():
        pass


def test_compiled_modules_are_followed() -> None:
    """torch.compile changes the names of parameters only."""
    plan = HybridPlan(mesh=(2,), layers=(LayerPlan(module="0", signature=("col",)),))
    with pretended_job(2):
        module = nn.Sequential(nn.Linear(8, 8))
        split = SplitModel(module, plan, LiveMesh(plan))
        split.split()
        reduction = GradientReduction(split)
        module[0] = torch.compile(module[0], backend="eager")
        with reduction.backward():
            pass


def test_frozen_parameters_are_followed(split: SplitModel) -> None:
    reduction = GradientReduction(split)
    split.module.bias.requires_grad_(False)
    with reduction.backward():
        pass
