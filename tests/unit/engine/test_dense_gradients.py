"""Gradients of a dense message, without other ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lightning_autosync.engine.gradients import DenseGradients
from lightning_autosync.plan import Compressor


def test_a_message_without_an_exchange_leaves_gradients_alone() -> None:
    """Of an accelerator, where each gradient is packed when it arrives; here its parameter has just been unfrozen."""
    parameter = nn.Parameter(torch.ones(3))
    message: Any = SimpleNamespace(name="all", numel=3, axis=0, compressor=Compressor(), variables=("weight",))
    buffer, exchange = torch.zeros(4), SimpleNamespace(result=None)
    gradients = DenseGradients(message, [parameter], buffer, exchange, world_size=2, as_views=True)  # type: ignore[arg-type]
    gradients._packs_together = False
    parameter.grad = buffer[:3].fill_(4.0)
    parameter.requires_grad_(False)
    gradients.arm()
    parameter.requires_grad_(True)
    gradients.arm(changed=True)
    gradients.on_arrival(0)()
    assert parameter.grad.tolist() == [4.0] * 3
