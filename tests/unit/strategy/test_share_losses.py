"""Losses that are sums, and batches that can be cut into parts."""

from __future__ import annotations

import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_autosync.errors import PlanError
from lightning_autosync.strategy.shares.losses import check_loss
from lightning_autosync.strategy.shares.memory import is_memory_error
from lightning_autosync.strategy.shares.parts import IndivisibleError, cut

TARGETS = torch.tensor([0, 1, 0, 1])
IGNORED = torch.tensor([0, 1, -100, 1])
CLASS_WEIGHTS = torch.tensor([1.0, 3.0])


@pytest.mark.parametrize("as_mapping", [False, True])
@pytest.mark.parametrize(
    "loss",
    [
        lambda values: F.cross_entropy(values, TARGETS, reduction="sum"),
        lambda values: -F.mse_loss(values, values.detach() + 1.0, reduction="sum") + 0.1,
    ],
    ids=["cross entropy", "squares"],
)
def test_sums_of_losses_are_refused(loss: Callable[[Tensor], Tensor], as_mapping: bool) -> None:
    value = loss(torch.randn(4, 2, requires_grad=True))
    with pytest.raises(PlanError, match=r"^loss: training_step returns a loss with reduction='sum'"):
        check_loss({"loss": value} if as_mapping else value)


@pytest.mark.parametrize(
    "loss",
    [
        lambda values: values.sum(),
        lambda values: values.square().sum() * 0.5,
        lambda values: F.cross_entropy(values, TARGETS, reduction="sum") * 0.25,  # may be a mean, so it is no error
        lambda values: values.mean() + 0.1 * values.square().sum(),
        lambda values: values.mean() - values.sum(),
        lambda values: 1.0 - values.sum(),
        lambda values: values.mean() + F.mse_loss(values, values.detach() + 1.0, reduction="sum"),  # of weights?
    ],
    ids=["sum", "half", "part of a loss", "second term", "subtracted", "subtracted from a number", "sum of squares"],
)
def test_other_sums_are_warned_of(loss: Callable[[Tensor], Tensor]) -> None:
    with pytest.warns(UserWarning, match="training_step returns a sum"):
        check_loss(loss(torch.randn(4, 2, requires_grad=True)))


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (lambda values: F.cross_entropy(values, IGNORED), "ignored targets"),
        (lambda values: F.cross_entropy(values, TARGETS, ignore_index=1), "ignored targets"),
        (lambda values: F.cross_entropy(values.view(2, 2, 2), IGNORED.view(2, 2)), "ignored targets"),
        (lambda values: 0.5 * F.cross_entropy(values, IGNORED) + values.square().mean(), "ignored targets"),
        (lambda values: F.cross_entropy(values, TARGETS, weight=CLASS_WEIGHTS), "class weights"),
        (lambda values: F.nll_loss(values, IGNORED, CLASS_WEIGHTS), "ignored targets and class weights"),
        (lambda values: F.cross_entropy(values, IGNORED, label_smoothing=0.1), "ignored targets"),
    ],
    ids=["ignored", "index", "tokens", "first of two", "weights", "both", "smoothing"],
)
def test_means_over_terms_that_samples_have_different_numbers_of_are_warned_of(
    loss: Callable[[Tensor], Tensor], what: str
) -> None:
    with pytest.warns(UserWarning, match=rf"training_step returns a mean .* with {what}: .*loss_weight"):
        check_loss(loss(torch.randn(4, 2, requires_grad=True)))


@pytest.mark.parametrize(
    "loss",
    [
        lambda values: F.cross_entropy(values, TARGETS),
        lambda values: F.cross_entropy(values, TARGETS, torch.tensor([2.0, 2.0]), label_smoothing=0.1),
        lambda values: F.cross_entropy(values.view(2, 2, 2), TARGETS.view(2, 2)),
        lambda values: F.cross_entropy(values, TARGETS, reduction="none").mean() * 2.0,
        lambda values: values.square().sum(dim=1).mean(),
        lambda values: values.square().sum() / len(values),
        lambda values: values.detach().sum(),
        lambda _: None,
    ],
    ids=["mean", "equal weights", "tokens", "mean of losses", "mean of sums", "sum by length", "no graph", "no loss"],
)
def test_means_are_not(loss: Callable[[Tensor], Tensor | None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_loss(loss(torch.randn(4, 2, requires_grad=True)))


def test_a_loss_whose_backward_pass_was_made_is_not_asked_for_its_targets() -> None:
    loss = F.cross_entropy(torch.randn(4, 2, requires_grad=True), IGNORED)
    loss.backward()
    check_loss(loss)


def test_parts_of_a_batch_have_the_same_samples_everywhere() -> None:
    Pair = namedtuple("Pair", ["values", "names"])
    values = torch.arange(3)
    batch = OrderedDict(pair=Pair(values, ["a", "b", "c"]), both=[values, values + 3], step=torch.tensor(5), rate=0.1)
    part = cut(batch, 3, slice(1, 3))
    assert type(part) is OrderedDict
    assert (part["pair"].values.tolist(), part["pair"].names) == ([1, 2], ["b", "c"])
    assert [each.tolist() for each in part["both"]] == [[1, 2], [4, 5]]
    assert (int(part["step"]), part["rate"]) == (5, 0.1)
    assert batch["pair"].names == ["a", "b", "c"]


@pytest.mark.parametrize("batch", [torch.zeros(4), [torch.zeros(3), torch.zeros(5)], object()])
def test_batches_whose_samples_are_unknown_are_not_cut(batch: Any) -> None:
    with pytest.raises(IndivisibleError):
        cut(batch, 3, slice(0, 1))


def test_memory_errors() -> None:
    full = RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried ...")
    assert all(map(is_memory_error, [MemoryError(), torch.OutOfMemoryError(), full]))
    of_gpus = (
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    )
    assert all(is_memory_error(RuntimeError(text)) for text in of_gpus)
    assert not any(map(is_memory_error, [RuntimeError("shapes differ"), ValueError()]))
