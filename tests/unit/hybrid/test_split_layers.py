"""Split layers do as torch's own where these are called in unusual ways."""

from __future__ import annotations

import pytest
import torch
from collective_traffic import pretended_job
from torch import nn

from lightning_autosync.errors import PlanError
from lightning_autosync.hybrid import HybridPlan, LayerPlan
from lightning_autosync.hybrid.execution.live_mesh import LiveMesh
from lightning_autosync.hybrid.execution.split_model import SplitModel

SIGNATURES = {"self_attn": "dp", "linear1": "col", "linear2": "row", "norm1": "dp", "norm2": "dp"}


def test_an_encoder_validates_batches_that_are_padded_at_the_end() -> None:
    """In evaluation it would make a nested tensor of them before it calls a layer."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1).eval()
    plan = HybridPlan(
        mesh=(2,),
        layers=tuple(LayerPlan(module=f"layers.0.{name}", signature=(how,)) for name, how in SIGNATURES.items()),
    )
    value, padding = torch.ones(2, 4, 8), torch.tensor([[False] * 4, [False] * 3 + [True]])
    with pretended_job(2), torch.no_grad():
        split = SplitModel(encoder, plan, LiveMesh(plan))
        split.split()
        with split.forward(value):
            assert encoder(value, src_key_padding_mask=padding).shape == (2, 4, 8)
        assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("index", [-1, 8])
def test_an_index_that_no_row_has_is_refused(index: int) -> None:
    plan = HybridPlan(mesh=(2,), layers=(LayerPlan(module="", signature=("row",)),))
    with pretended_job(2):
        split = SplitModel(nn.Embedding(8, 3), plan, LiveMesh(plan))
        split.split()
        indices = torch.tensor([0, 7])
        with split.forward(indices):
            split.module(indices)
        indices = torch.tensor([0, index])
        with split.forward(indices), pytest.raises(IndexError, match="index out of range; allowed: 0 to 7"):
            split.module(indices)


def test_parameters_that_shall_not_be_synchronized_are_refused() -> None:
    plan = HybridPlan(mesh=(2,), layers=(LayerPlan(module="", signature=("col",)),))
    module = nn.Linear(8, 8)
    module._ddp_params_and_buffers_to_ignore = ["bias"]
    with pretended_job(2), pytest.raises(PlanError, match="model: _ddp_params_and_buffers_to_ignore names 'bias'"):
        SplitModel(module, plan, LiveMesh(plan))
