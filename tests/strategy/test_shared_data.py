"""What is said of loaders that cannot be dealt out."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, WeightedRandomSampler

from lightning_autosync.strategy.shared_data import describe_equal_shares

DATA: Any = range(8)
RANK = {"num_replicas": 2, "rank": 0}


class Own(BatchSampler):
    """Batches made some other way."""


@pytest.mark.parametrize(
    ("loader", "name"),
    [
        (DataLoader(DATA, sampler=DistributedSamplerWrapper(WeightedRandomSampler([1.0] * 8, 8), **RANK)), "Weighted"),
        (DataLoader(DATA, sampler=RandomSampler(DATA)), "RandomSampler"),
        (DataLoader(DATA, batch_sampler=Own(DistributedSampler(DATA, **RANK), 2, False)), "Own"),
        # Loaded too early.
        (DataLoader(DATA, sampler=DistributedSampler(DATA, **RANK)), "DistributedSampler"),
        (DATA, "range"),
    ],
)
def test_who_draws_is_named(loader: Any, name: str) -> None:
    assert describe_equal_shares(loader).startswith(f"train_dataloader: the batches of a {name}")
