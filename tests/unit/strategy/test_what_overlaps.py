"""Modules of which no step can overlap, and the reasons."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from lightning_autosync.strategy.overlap import _why_not


class Other(nn.Parameter):
    pass


def graphed() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def forward(inputs: Any) -> Any:  # as `torch.cuda.make_graphed_callables` sets it
        return inputs

    forward.__module__ = "torch.cuda.graphs"
    module[1].forward = forward  # type: ignore[method-assign]
    return module


def with_other_class() -> nn.Module:
    module = nn.Linear(2, 2)
    module.weight = Other(module.weight.detach())
    return module


class Decorated(nn.Linear):
    @torch.compile(backend="eager")
    def compute(self, inputs: Any) -> Any:
        return self(inputs)


class NotCompiled(nn.Linear):
    @torch.compiler.disable
    def compute(self, inputs: Any) -> Any:
        return self(inputs)


def with_compiled_attribute() -> nn.Module:
    module: Any = nn.Sequential(nn.Linear(2, 2))
    module[0].compute = torch.compile(module[0].forward, backend="eager")
    return cast(nn.Module, module)


REASONS: dict[str, tuple[nn.Module, str]] = {
    "several devices": (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")), "the model is on 'meta'"),
    "graph": (graphed(), "'1' runs as a CUDA graph"),
    "script": (nn.Sequential(torch.jit.script(nn.Linear(2, 2))), "'0' is a TorchScript module"),
    "class": (with_other_class(), "'weight' of the model is a Other"),
    "compiled": (nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager")), "'0' is compiled"),
    "compiled method": (Decorated(2, 2), "'compute' of the model is compiled"),
    "compiled attribute": (with_compiled_attribute(), "'compute' of '0' is compiled"),
}


@pytest.mark.parametrize("name", REASONS)
def test_why_steps_wait(name: str) -> None:
    module, reason = REASONS[name]
    assert _why_not(module).startswith(reason)


def test_plain_modules_overlap() -> None:
    assert not _why_not(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), NotCompiled(2, 2)))
