"""Which data loaders can be cut, and what their global batches are."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_autosync.errors import PlanError
from lightning_autosync.strategy.log import rank_zero_info
from lightning_autosync.strategy.shares.cuts import Shares, divide_batch
from lightning_autosync.strategy.shares.sampler import (
    Dealer,
    GlobalBatches,
    GlobalOrder,
    SharedBatchSampler,
    is_distributed,
)
from lightning_autosync.strategy.shares.streams import GlobalStream

CUTTABLE = (
    "allowed: a DataLoader of a map-style data set with batch_size, shuffle or a sampler, to which Lightning gives its "
    "distributed sampler (use_distributed_sampler=True); or batch_sampler=GlobalBatches(...), with "
    "use_distributed_sampler=False; or a GlobalStream with drop_last=True"
)
"""What messages say of loaders that can be cut."""


def is_global(loader: DataLoader[Any]) -> bool:
    """Whether the user has marked the data of a loader as those of all ranks."""
    own = isinstance(getattr(loader, "batch_sampler", None), GlobalBatches)
    return own or isinstance(getattr(loader, "dataset", None), GlobalStream)


def global_batches(
    loader: object, dealer: Dealer, shares: Shares
) -> tuple[GlobalOrder | GlobalBatches, Dealer, int | None]:
    """The arguments of a `SharedBatchSampler` for a loader: its global batches, ``dealer``, and the size of a batch.

    Args:
        loader: the user's loader, of a map-style data set.
        dealer: says how batches are cut.
        shares: the share of each rank.

    Raises:
        PlanError: the loader cannot be cut, or a rank would get no sample of a full batch.
    """
    if not isinstance(loader, DataLoader):
        raise PlanError(f"batch_shares: a {type(loader).__name__} cannot be cut; {CUTTABLE}")
    if isinstance(loader.dataset, IterableDataset):
        raise PlanError(
            f"batch_shares: {type(loader.dataset).__name__} is an IterableDataset, and may yield other "
            f"samples on other ranks; {CUTTABLE}"
        )
    batches: Any = loader.batch_sampler  # a GlobalBatches is no sampler of torch's
    if isinstance(batches, SharedBatchSampler):  # this loader was cut for an earlier training
        return batches.batches, dealer, batches.size
    if isinstance(batches, GlobalBatches):
        return batches, dealer, None
    if type(batches) is not BatchSampler:
        what = "a DataLoader without automatic batches" if batches is None else f"a {type(batches).__name__}"
        raise PlanError(f"batch_shares: {what} cannot be cut; {CUTTABLE}")
    if not is_distributed(loader):
        raise PlanError(
            f"batch_shares: a {type(batches.sampler).__name__} does not say which samples other ranks draw; {CUTTABLE}"
        )
    sampler: Any = batches.sampler
    samples, total = len(sampler.dataset), batches.batch_size * len(shares)
    parts = divide_batch(total, shares, dealer.unit)
    if samples < (total if batches.drop_last else len(shares)):
        raise PlanError(
            f"batch_shares: there are {samples} samples for {len(shares)} ranks"
            + (f" and global batches of {total} (drop_last=True)" if batches.drop_last else "")
            + "; use more samples or fewer ranks"
        )
    rank_zero_info(f"AutoSync: ranks compute {', '.join(map(str, parts))} of the {total} samples of a global batch")
    return GlobalOrder(sampler, total, batches.drop_last), dealer, total
