"""Masks of attention that is split by heads."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from collective_traffic import pretended_job
from torch import Tensor, nn

from lightning_autosync.errors import ExchangeError
from lightning_autosync.hybrid import HybridPlan, LayerPlan
from lightning_autosync.hybrid.execution.activation import Surroundings
from lightning_autosync.hybrid.execution.live_mesh import LiveMesh
from lightning_autosync.hybrid.execution.split_model import SplitModel

VALUE = torch.ones(2, 3, 8)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.register_buffer("mask", torch.zeros(3, 3))

    def forward(self, value: Tensor, mask: Tensor | None) -> None:
        self.attention(value, value, value, attn_mask=mask, need_weights=False)


@pytest.fixture
def split() -> Iterator[SplitModel]:
    plan = HybridPlan(mesh=(2,), layers=(LayerPlan(module="attention", signature=("heads",)),))
    with pretended_job(2), mock.patch.object(Surroundings, "alike", return_value=False):
        found = SplitModel(Masked(), plan, LiveMesh(plan))
        found.split()
        yield found


def test_a_mask_that_differs_between_ranks_is_refused(split: SplitModel) -> None:
    with (
        split.forward(VALUE),
        pytest.raises(ExchangeError, match="'attention': a two-dimensional attn_mask must be the same"),
    ):
        split.module(VALUE, torch.zeros(3, 3))
    with (
        split.forward(VALUE),
        pytest.raises(ExchangeError, match="'attention': a two-dimensional attn_mask must be the same"),
    ):
        split.module(VALUE, split.module.get_buffer("mask"))


def test_masks_by_sample_and_those_that_are_learned_are_not_compared(split: SplitModel) -> None:
    with split.forward(VALUE):
        split.module(VALUE, torch.zeros(4, 3, 3))
        split.module(VALUE, nn.Parameter(torch.zeros(3, 3)))
        split.module(VALUE, None)


def test_a_hint_without_a_mask_is_refused_as_by_torch(split: SplitModel) -> None:
    attention = split.module.get_submodule("attention")
    with split.forward(VALUE), pytest.raises(RuntimeError, match="Need attn_mask if specifying the is_causal hint"):
        attention(VALUE, VALUE, VALUE, is_causal=True, need_weights=False)
