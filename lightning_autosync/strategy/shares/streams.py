"""Iterable data sets that all ranks read, and of whose samples each rank keeps its part of every batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Sampler

from lightning_autosync.errors import PlanError
from lightning_autosync.strategy.shares.cuts import Cut


class GlobalStream(IterableDataset[Any]):
    """Marks an iterable data set that yields the same samples on all ranks, so that AutoSync can cut its batches::

        DataLoader(GlobalStream(lines), batch_size=16, drop_last=True)

    Each rank reads all samples and keeps its own. Samples at the end that do not fill a global batch are left out. With
    workers of a data loader, each worker makes whole batches, so the data set deals out its samples to workers
    (``torch.utils.data.get_worker_info``), as for any data loader.

    Args:
        stream: an iterable of samples; if it has a length, so has the data loader.
    """

    def __init__(self, stream: Iterable[Any]) -> None:
        self._stream = stream
        self._counts: Sequence[int] = ()
        self._rank = 0

    def cut(self, counts: Sequence[int], rank: int) -> None:
        """Keep the samples of ``rank`` of batches with so many samples of each rank."""
        self._counts, self._rank = counts, rank

    def __len__(self) -> int:
        total = sum(self._counts)
        samples = len(self._stream)  # type: ignore[arg-type]  # a TypeError says that there is no length
        # A data loader divides this number by its own batch size.
        return samples // total * (total // len(self._counts)) if total else samples

    def __iter__(self) -> Iterator[Any]:
        if not self._counts:  # on a single rank, or without shares
            yield from self._stream
            return
        total, start = sum(self._counts), sum(self._counts[: self._rank])
        batch: list[Any] = []
        for sample in self._stream:
            batch.append(sample)
            if len(batch) == total:
                yield from batch[start : start + self._counts[self._rank]]
                batch = []


class StreamBatches(Sampler[list[None]]):
    """Tells a data loader how many samples of a stream make a batch of this rank.

    Args:
        counts: samples of each rank in a global batch.
        rank: this rank.
    """

    def __init__(self, counts: Sequence[int], rank: int) -> None:
        self._cut = Cut(counts[rank], sum(counts), len(counts))

    def __iter__(self) -> Iterator[list[None]]:
        while True:
            yield [None] * self._cut.samples

    def take(self) -> Cut:
        """The cut of each batch."""
        return self._cut


def cut_stream(loader: DataLoader[Any], counts: Sequence[int], rank: int) -> StreamBatches:
    """Let a data loader of a `GlobalStream` load this rank's samples; returns its new batch sampler.

    Raises:
        PlanError: the data loader would return batches that are not full.
    """
    if not loader.drop_last:
        raise PlanError("batch_shares: a GlobalStream needs DataLoader(drop_last=True), because its end is not known")
    assert isinstance(loader.dataset, GlobalStream)
    loader.dataset.cut(counts, rank)
    return StreamBatches(counts, rank)
