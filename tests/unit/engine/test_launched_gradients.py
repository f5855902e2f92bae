"""Gradients that have come are unscaled and clipped together, with the bits of PyTorch's own functions."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from lightning_autosync.engine.due_parameter import Due
from lightning_autosync.engine.launched_gradients import change_gradients

DTYPES = (torch.float32, torch.bfloat16, torch.float32, torch.float64, torch.bfloat16)
OWNER: Any = None
"""Completes parameters, which these tests do not do."""


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(1)
    made = [nn.Parameter(torch.zeros(7, 5, dtype=dtype)) for dtype in DTYPES]
    for parameter in made:
        parameter.grad = torch.randn(7, 5).to(parameter.dtype)
    return made


def test_gradients_are_changed_as_by_pytorch() -> None:
    found, expected = parameters(), parameters()
    inverse, factor = torch.tensor(1 / 3), torch.tensor(0.7)
    change_gradients([(each, Due(OWNER, 0, inverse=inverse, factor=factor, limit=0.1)) for each in found[:4]])
    scaler = torch.amp.GradScaler("cpu")
    scaler._unscale_grads_(torch.optim.SGD(expected[:4]), inverse, torch.zeros(()), False)
    for parameter in expected[:4]:
        assert parameter.grad is not None
        parameter.grad *= factor
    nn.utils.clip_grad_value_(expected[:4], 0.1)
    for one, other in zip(found, expected, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert one.grad.equal(other.grad)


def test_gradients_are_changed_in_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {}
    for name in ("_amp_foreach_non_finite_check_and_unscale_", "_foreach_mul_"):
        calls[name] = Mock(wraps=getattr(torch, name))
        monkeypatch.setattr(torch, name, calls[name])
    inverse, factor = torch.tensor(0.5), torch.tensor(0.7)
    change_gradients([(each, Due(OWNER, 0, inverse=inverse, factor=factor)) for each in parameters()])
    assert [each.call_count for each in calls.values()] == [len(set(DTYPES)), 1]


def test_parameters_keep_what_is_theirs() -> None:
    """Optimizers have factors of their own, and some parameters have no gradient."""
    changed, other, unused, untouched = parameters()[:4]
    unused.grad = None
    before = [each.grad.clone() for each in (changed, other, untouched) if each.grad is not None]
    halves, doubles = torch.tensor(0.5), torch.tensor(2.0)
    dues = [Due(OWNER, 0, factor=halves), Due(OWNER, 0, factor=doubles), Due(OWNER, 0, factor=halves), Due(OWNER, 0)]
    change_gradients(list(zip((changed, other, unused, untouched), dues, strict=True)))
    assert unused.grad is None
    assert changed.grad is not None
    assert changed.grad.equal(before[0] * 0.5)
    assert other.grad is not None
    assert other.grad.equal(before[1] * 2.0)
    assert untouched.grad is not None
    assert untouched.grad.equal(before[2])
