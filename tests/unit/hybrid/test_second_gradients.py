"""Gradients of gradients across a change of layout, which are refused, in a job of one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autosync.errors import AutoSyncError
from lightning_autosync.hybrid import HybridPlan, LayerPlan
from lightning_autosync.hybrid.execution.activation import Activation, Surroundings
from lightning_autosync.hybrid.execution.boxing import change_layout
from lightning_autosync.hybrid.execution.layouts import Layout
from lightning_autosync.hybrid.execution.live_mesh import LiveMesh
from lightning_autosync.hybrid.execution.random_streams import RandomStreams

HOME = Layout(("batch",))


@pytest.fixture(scope="module")
def mesh() -> Iterator[LiveMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield LiveMesh(HybridPlan(mesh=(1,), layers=(LayerPlan(module="", signature=("col",)),)))
    finally:
        dist.destroy_process_group()


def test_a_penalty_on_gradients_is_refused(mesh: LiveMesh) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    made = change_layout(x * 1.0, HOME, ("full",), mesh)
    (gradient,) = torch.autograd.grad((made**3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


def test_hooks_on_gradients_that_are_differentiated_again_are_refused(mesh: LiveMesh) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    around = Surroundings(mesh, RandomStreams(0, mesh.coordinates, torch.device("cpu")))
    value: Tensor = Activation(x * 1.0, HOME.with_states(("full",)), around)
    value.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(AutoSyncError, match="cannot be differentiated again"):
        torch.autograd.grad((value**3).sum(), x, create_graph=True)
