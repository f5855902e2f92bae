"""What split models send is on the device of the process group, and contiguous, as NCCL needs it."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_autosync.hybrid.execution import equivalence, live_mesh, reduction
from lightning_autosync.hybrid.execution.split_model import SplitModel

DEVICE = torch.device("meta")
"""In place of a GPU."""


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The tensors of all-reduces."""
    found: list[Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, *_, **__: found.append(tensor))
    return found


def test_a_number_on_the_cpu_is_compared_on_the_device(split: SplitModel, sent: list[Tensor]) -> None:
    with (
        mock.patch.object(live_mesh, "group_device", return_value=DEVICE),
        mock.patch.object(Tensor, "tolist", return_value=[7, -7]),
    ):
        assert split.around.alike(torch.tensor(2))
    assert [tensor.device for tensor in sent] == [DEVICE]


def test_the_norm_of_no_gradients_is_on_the_device(split: SplitModel, sent: list[Tensor]) -> None:
    with mock.patch.object(reduction, "group_device", return_value=DEVICE):
        assert reduction.gradient_norm(split, split.module.parameters()).device == DEVICE
    assert [tensor.device for tensor in sent] == [DEVICE]


def test_gradients_of_transposed_weights_are_sent_contiguous(split: SplitModel, sent: list[Tensor]) -> None:
    weight = nn.Parameter(torch.randn(4, 3).t())
    (weight * torch.arange(12.0).view(3, 4)).sum().backward()
    assert weight.grad is not None
    assert not weight.grad.is_contiguous()
    mean = equivalence._mean(weight, split.mesh.group((0,)))
    assert all(tensor.is_contiguous() for tensor in sent)
    assert mean is not None
    assert torch.equal(mean, torch.arange(12.0).view(3, 4) / 2)
