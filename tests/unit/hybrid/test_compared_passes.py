"""What ranks compare before each pass of a split model."""

from __future__ import annotations

import warnings
from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_autosync.errors import ExchangeError
from lightning_autosync.hybrid.execution import split_model
from lightning_autosync.hybrid.execution.activation import bring_home
from lightning_autosync.hybrid.execution.compared_buffers import ComparedBuffers
from lightning_autosync.hybrid.execution.split_model import SplitModel


@dataclass
class Sample:
    inputs: Tensor
    name: str = "sample"


Pair = namedtuple("Pair", ["inputs", "labels"])
INPUTS = torch.ones(2, 8)


def _other_ranks(monkeypatch: pytest.MonkeyPatch, shapes: Any) -> None:
    """Rank 1 has a batch of other shapes."""
    monkeypatch.setattr(ComparedBuffers, "exchange", lambda *_: False)
    monkeypatch.setattr(split_model, "gather_json", lambda own, group: [own, [shapes, *own[1:]]])


@pytest.mark.parametrize(
    "batch",
    [
        INPUTS,
        [INPUTS],
        {"inputs": INPUTS},
        UserDict(inputs=INPUTS),
        Sample(INPUTS),
        Pair(INPUTS, "a"),
        [[{"a": INPUTS}]],
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_tensors_are_found_in_batches(split: SplitModel, monkeypatch: pytest.MonkeyPatch, batch: Any) -> None:
    _other_ranks(monkeypatch, [[3, 8]])
    with (
        pytest.raises(ExchangeError, match=r"batch: its tensors have shapes \[\[3, 8\]\] on rank 1, but \[\[2, 8\]\]"),
        split.forward(batch),
    ):
        pass


@pytest.mark.parametrize(("first", "other", "has", "lacks"), [(True, False, 0, 1), (False, True, 1, 0)])
def test_the_rank_that_trains_is_named(first: bool, other: bool, has: int, lacks: int) -> None:
    found = [[[[2, 8]], [True, first], 0, 0, 0, []], [[[2, 8]], [True, other], 0, 0, 0, []]]
    with pytest.raises(ExchangeError, match=f"parameter 'bias' is trained on rank {has}, but frozen on rank {lacks};"):
        split_model._refuse_differences(found, ["weight", "bias"])


def test_batches_without_tensors_are_refused(split: SplitModel) -> None:
    with pytest.raises(ExchangeError, match="batch: it contains no tensor"), split.forward(object()):
        pass


def test_a_call_outside_of_a_pass_is_warned_of_once(split: SplitModel) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with split.forward(INPUTS):
            value = checkpoint(split.module, INPUTS.clone().requires_grad_(), use_reentrant=False)
            loss = bring_home(value).sum()
        loss.backward()  # calls the layer again
    with pytest.warns(UserWarning, match="split layer '' is called outside of a step: the job hangs unless all ranks"):
        split.module(INPUTS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        split.module(INPUTS)
