"""Gradients of a dense message, without other ranks."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_autosync.engine.gradients import DenseGradients
from lightning_autosync.plan import Compressor


def test_a_message_without_an_exchange_leaves_gradients_alone() -> None:
    """Its parameter has just been unfrozen."""
    parameter = nn.Parameter(torch.ones(3))
    message: Any = SimpleNamespace(name="all", numel=3, axis=0, compressor=Compressor(), variables=("weight",))
    buffer, exchange = torch.zeros(4), SimpleNamespace(result=None)
    gradients = DenseGradients(message, [parameter], buffer, exchange, world_size=2, as_views=True)  # type: ignore[arg-type]
    parameter.grad = buffer[:3].fill_(4.0)
    parameter.requires_grad_(False)
    gradients.arm()
    parameter.requires_grad_(True)
    gradients.arm(changed=True)
    gradients.on_arrival(0)()
    assert parameter.grad.tolist() == [4.0] * 3


@pytest.mark.parametrize("as_views", [False, True])
def test_a_gradient_is_packed_when_it_arrives_and_its_memory_is_free_then(as_views: bool) -> None:
    parameter = nn.Parameter(torch.ones(3))
    message: Any = SimpleNamespace(name="all", numel=3, axis=0, compressor=Compressor(), variables=("weight",))
    buffer, exchange = torch.zeros(4), SimpleNamespace(result=None)
    gradients = DenseGradients(message, [parameter], buffer, exchange, world_size=2, as_views=as_views)  # type: ignore[arg-type]
    gradients.arm()
    parameter.grad = torch.full((3,), 4.0)
    memory = weakref.ref(parameter.grad)
    gradients.on_arrival(0)()
    assert buffer.tolist() == [2.0, 2.0, 2.0, 0.0]
    assert (memory() is None) == as_views
    assert (parameter.grad.data_ptr() == buffer.data_ptr()) == as_views


@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize("kind", ["differentiable", "expanded", "scalar", "view", "none"])
def test_gradients_of_all_forms_are_packed(kind: str, as_views: bool) -> None:
    parameter = nn.Parameter(torch.tensor(1.0) if kind == "scalar" else torch.ones(3))
    message: Any = SimpleNamespace(
        name="all", numel=parameter.numel(), axis=0, compressor=Compressor(), variables=("weight",)
    )
    buffer, exchange = torch.zeros(parameter.numel() + 1), SimpleNamespace(result=None)
    gradients = DenseGradients(message, [parameter], buffer, exchange, world_size=2, as_views=as_views)  # type: ignore[arg-type]
    gradients.arm()
    forms = {
        "differentiable": lambda: torch.full((3,), 4.0, requires_grad=True) * 1.0,
        "expanded": lambda: torch.tensor(4.0).expand(3),
        "scalar": lambda: torch.tensor(4.0),
        "view": lambda: buffer[:3].fill_(4.0),
        "none": lambda: None,
    }
    parameter.grad = forms[kind]()
    gradients.on_arrival(0)()
    assert buffer[:-1].tolist() == [0.0 if kind == "none" else 2.0] * parameter.numel()
    assert parameter.grad is None or not parameter.grad.requires_grad or not as_views


@pytest.mark.parametrize("frozen", [False, True])
def test_counts_of_unused_parameters_are_read_together(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator, each reading waits for the sums."""
    parameters = [nn.Parameter(torch.ones(1), requires_grad=not frozen) for _ in range(3)]
    message: Any = SimpleNamespace(name="all", numel=3, axis=0, compressor=Compressor(), variables=("a", "b", "c"))
    buffer, sums = torch.zeros(6), torch.tensor([4.0, 5.0, 0.0, 1.0, 2.0, 0.0])
    exchange: Any = SimpleNamespace(result=None, wait=lambda: buffer.copy_(sums))
    gradients = DenseGradients(message, parameters, buffer, exchange, world_size=3)
    gradients.arm()
    read: list[str] = []
    for name in ("tolist", "__float__", "item"):
        monkeypatch.setattr(Tensor, name, noting(name, getattr(Tensor, name), read))
    gradients.finish()
    monkeypatch.undo()
    assert read == ([] if frozen else ["tolist"])
    expected = [None] * 3 if frozen else [[4.0], [5.0], None]
    assert [None if one.grad is None else one.grad.tolist() for one in parameters] == expected


def noting(name: str, own: Any, read: list[str]) -> Any:
    """A method of tensors that notes its calls."""

    def method(tensor: Tensor) -> Any:
        read.append(name)
        return own(tensor)

    return method
