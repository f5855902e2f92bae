"""`SharedBatchSampler`: the batches of one rank, cut from global batches."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from lightning_autosync.engine.collectives import broadcast_tensors, group_device
from lightning_autosync.errors import PlanError
from lightning_autosync.strategy.shares.cuts import Cut, divide

Position = tuple[int, int]
"""A place in the data of a job: number of the pass, and number of the global batch in it."""


class Dealer(Protocol):
    """Says how batches are cut."""

    rank: int
    unit: int
    """Number of samples of which each rank's part of a full batch is a multiple."""

    def begin_pass(self) -> int:
        """Begin a pass over a data loader; returns its number."""

    def counts(self, position: Position, total: int) -> Sequence[int]:
        """The samples of each rank in a global batch of ``total`` samples at ``position``."""


class GlobalBatches:
    """Marks a batch sampler that yields whole global batches, which AutoSync cuts into one part for each rank::

        DataLoader(data, batch_sampler=GlobalBatches(BucketSampler(lengths, batch_size=64 * ranks)))

    Without it, AutoSync cannot know whether a batch sampler yields batches of one rank or of all ranks. The Trainer
    needs ``use_distributed_sampler=False``, and so does Fabric's ``setup_dataloaders``. All ranks use rank 0's batches.

    Args:
        batches: a batch sampler with a length. Its ``set_epoch`` is called, if it has one.
    """

    def __init__(self, batches: Any) -> None:
        self.sampler = batches  # Lightning calls `set_epoch` of an attribute with this name

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:  # as DataLoader's types ask of a batch sampler
        yield from self.sampler


class GlobalOrder:
    """The global batches of a data set that a sampler of one rank out of many draws from.

    Args:
        sampler: a `DistributedSampler`, or Lightning's wrapper of another sampler.
        size: number of samples in a global batch.
        drop_last: whether samples that do not fill a batch are left out.
    """

    def __init__(self, sampler: Any, size: int, drop_last: bool) -> None:
        self.sampler = sampler
        self._size, self._drop_last = size, drop_last
        self._samples = len(sampler.dataset)

    def __len__(self) -> int:
        return self._samples // self._size if self._drop_last else -(-self._samples // self._size)

    def __iter__(self) -> Iterator[Sequence[int]]:
        order = self._order()
        for batch in range(len(self)):
            yield order[batch * self._size : (batch + 1) * self._size]

    def _order(self) -> list[int]:
        whole = copy.copy(self.sampler)  # as it would be on a single rank: the samples of all ranks in their order
        whole.num_replicas, whole.rank = 1, 0
        whole.num_samples = whole.total_size = self._samples
        order = list(whole)
        if type(self.sampler) is DistributedSampler:
            return order  # by a seed that all ranks have
        return _agreed([order])[0]


class SharedBatchSampler(Sampler[list[int]]):
    """Yields this rank's part of each global batch.

    All ranks have the same number of batches. Each sample is in one part of one batch. A rank that gets no sample of a
    short batch repeats one of another rank's, so that it has something to compute; its cut says that it has 0 samples.

    Args:
        batches: global batches of indices, the same on all ranks; it can be iterated over once for each pass.
        dealer: says how batches are cut.
        size: number of samples in a full global batch; None: each batch is full, whatever its size.

    Attributes:
        batches: the global batches.
        size: number of samples in a full one.
    """

    def __init__(self, batches: GlobalOrder | GlobalBatches, dealer: Dealer, size: int | None) -> None:
        self.batches, self.size, self._dealer = batches, size, dealer
        self.sampler = batches.sampler  # Lightning calls its `set_epoch`
        self._cuts: deque[Cut] = deque()
        self._position: Position = (-1, 0)

    @property
    def position(self) -> Position:
        """The next global batch to be cut. Workers of a data loader may load batches long before they are used."""
        return self._position

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        # A pass begins when its first batch is drawn: data loaders make iterators that they do not use.
        number = self._dealer.begin_pass()
        cuts: deque[Cut] = deque()
        self._cuts = cuts
        self._position = (number, 0)
        batches: Iterable[Sequence[int]] = self.batches
        if isinstance(batches, GlobalBatches):
            check_lengths(len(batches))
            batches = _agreed(batches)
        rank = self._dealer.rank
        for index, batch in enumerate(batches):
            counts = self._dealer.counts((number, index), self.size or len(batch))
            if len(batch) != sum(counts):
                counts = divide(len(batch), counts, self._dealer.unit)
            start = sum(counts[:rank])
            cuts.append(Cut(counts[rank], len(batch), len(counts)))
            self._position = (number, index + 1)
            yield list(batch[start : start + counts[rank]]) or [batch[0]]

    def take(self) -> Cut:
        """The cut of the next batch that the data loader returned; call it once for each batch."""
        return self._cuts.popleft()


def is_distributed(loader: DataLoader[Any]) -> bool:
    """Whether the sampler of a loader draws the samples of one rank, in a way that is known here."""
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    # Either framework has its own class of the second name.
    known = type(sampler) is DistributedSampler or type(sampler).__name__ == "DistributedSamplerWrapper"
    return known and isinstance(sampler, DistributedSampler)


def check_lengths(own: int) -> None:
    """Refuse batch samplers whose lengths differ, because Lightning ends a rank's pass by its own length; collective.

    Raises:
        PlanError: (on every rank) they differ.
    """
    lengths = torch.tensor([own, -own], dtype=torch.int64, device=group_device(None))
    dist.all_reduce(lengths, dist.ReduceOp.MAX)
    most, least = int(lengths[0]), -int(lengths[1])
    if most != least:
        raise PlanError(
            f"batch_shares: the batch sampler in GlobalBatches has {least} to {most} batches, depending on the rank; "
            "its length has to be the same on all ranks"
        )


def _agreed(batches: Iterable[Sequence[int]]) -> list[list[int]]:
    """Rank 0's batches, on all ranks; collective.

    Samplers may draw random numbers, and ranks with different shares draw different numbers elsewhere, in dropout for
    example. So their generators are in different states.
    """
    device = group_device(None)
    first = dist.get_rank() == 0
    own = [list(batch) for batch in batches] if first else []
    sizes = torch.tensor([len(own), sum(map(len, own))], device=device)
    broadcast_tensors([sizes])
    lengths = torch.zeros(int(sizes[0]), dtype=torch.int64, device=device)
    indices = torch.zeros(int(sizes[1]), dtype=torch.int64, device=device)
    if first:
        lengths.copy_(torch.tensor(list(map(len, own)), dtype=torch.int64))
        indices.copy_(torch.tensor([index for batch in own for index in batch], dtype=torch.int64))
    broadcast_tensors([lengths, indices])
    return [part.tolist() for part in indices.split(lengths.tolist())]
