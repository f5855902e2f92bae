"""To which batch gradients belong, where there are several loaders, passes, and batches without a cut."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, DistributedSampler

from lightning_autosync.errors import PlanError
from lightning_autosync.strategy.fabric import SharedLoader
from lightning_autosync.strategy.shares.auto import AutoShares
from lightning_autosync.strategy.shares.batch_shares import BatchShares
from lightning_autosync.strategy.shares.cuts import Cut
from lightning_autosync.strategy.trainer import check_one_loader

SHARES = (1.0, 2.0, 3.0)


def cut_loader(shares: BatchShares, samples: int) -> SharedLoader:
    data: Any = range(samples)
    loader = DataLoader(data, 4, sampler=DistributedSampler(data, num_replicas=3, rank=shares.rank))
    return SharedLoader(loader, shares.cut_loader(loader), shares)


def uncut_loader(shares: BatchShares) -> SharedLoader:
    data: Any = range(5)
    return SharedLoader(DataLoader(data, 2), None, shares)


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("ends", [True, False])
def test_an_evaluation_within_training_does_not_change_the_weight(cut: bool, ends: bool) -> None:
    shares = BatchShares(SHARES, 0)
    training = cut_loader(shares, 62)
    evaluation = cut_loader(shares, 13) if cut else uncut_loader(shares)
    weights = []
    for _ in training:
        before = shares.present
        for _ in evaluation:
            assert shares.present is not before
            if not ends:
                break
        assert shares.present is before
        weights.append(shares.weight)
    assert weights == [0.5] * 5 + [0.0]


def test_a_batch_outlives_its_pass() -> None:
    shares = BatchShares(SHARES, 0)
    next(iter(cut_loader(shares, 62)))
    assert shares.weight == 0.5


def test_a_gradient_of_a_loader_that_is_not_cut_is_an_error() -> None:
    shares = BatchShares(SHARES, 0)
    list(cut_loader(shares, 62))
    for _ in uncut_loader(shares):
        with pytest.raises(PlanError, match="the last batch is of another loader"):
            _ = shares.weight


def test_a_pass_within_a_pass_over_the_same_loader_is_refused() -> None:
    loader = cut_loader(BatchShares(SHARES, 0), 62)
    first = iter(loader)
    next(first)
    list(loader)
    with pytest.raises(PlanError, match="a second pass over a data loader began before this one ended"):
        next(first)


def test_a_batch_that_is_not_computed_has_a_cut_too() -> None:
    shares = BatchShares(SHARES, 2)
    loader: Any = cut_loader(shares, 14)._own
    assert len(list(loader)) == 2
    shares.skip_batch()
    shares.begin_batch(None)
    assert shares.cut == Cut(1, 2, 3)


def test_loaders_in_a_loader_are_several() -> None:
    one: Any = range(3)

    def trainer(loaders: Any) -> Any:
        return SimpleNamespace(fit_loop=SimpleNamespace(_combined_loader=CombinedLoader(loaders)))

    check_one_loader(trainer({"a": DataLoader(one)}))
    with pytest.raises(PlanError, match=r"^train_dataloader: 2 loaders at once"):
        check_one_loader(trainer({"a": {"b": DataLoader(one), "c": DataLoader(one)}}))


def test_a_batch_counts_that_is_as_large_as_others_and_not_the_first_one() -> None:
    shares = AutoShares(0, 3, torch.device("cpu"))
    for total in (2, 6, 6, 4, 6):  # the first batch has fewer samples than there are ranks
        sampler: Any = SimpleNamespace(take=lambda total=total: Cut(total // 3, total, 3))
        shares.begin_batch(None, sampler)
        shares.end_backward(overlaps=False, usual=True, steady=True)
        shares._keep(steady=True)
    kept = [(samples, math.isfinite(busy)) for samples, busy, _ in shares._measured]
    assert kept[-3:] == [(2, True), (0, False), (2, True)]
