"""A sampler whose epoch is one pass over the data by all workers together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

from lightning_autosync.runtime.relaxed.work import SharedWork


class SharedSampler(Sampler[int]):
    """Indices of the portions that this worker takes; its number is known only when the epoch is over.

    There is no ``__len__``: how much a worker does depends on how fast it is. Lightning calls `set_epoch`.

    Args:
        work: deals out positions.
        length: samples of the data set.
        portion: samples asked for at a time; a batch is right.
        shuffle: whether each epoch has an order of its own, the same on all workers.
        seed: of that order.
        epoch: the first pass.
    """

    def __init__(
        self, work: SharedWork, length: int, portion: int, shuffle: bool, seed: int = 0, epoch: int = 0
    ) -> None:
        self._work = work
        self._length = length
        self._portion = portion
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = epoch

    def set_epoch(self, epoch: int) -> None:
        """The pass that the next iteration belongs to."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        epoch = self._epoch
        order: Any = range(self._length)
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            order = torch.randperm(self._length, generator=generator).tolist()
        while portion := self._work.take(epoch, self._length, self._portion):
            yield from (order[position] for position in portion)


def share_data(dataloader: object, work: SharedWork, epoch: int) -> bool:
    """Deal out what ``dataloader`` draws by a plain DistributedSampler, from pass ``epoch`` on; whether it does."""
    if not isinstance(dataloader, DataLoader) or type(dataloader.sampler) is not DistributedSampler:
        return False
    batches = dataloader.batch_sampler
    if type(batches) is not BatchSampler:
        return False
    sampler = dataloader.sampler
    length = len(sampler.dataset)  # type: ignore[arg-type]
    batches.sampler = SharedSampler(work, length, batches.batch_size, sampler.shuffle, sampler.seed, epoch)
    return True
