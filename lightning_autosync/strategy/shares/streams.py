"""Iterable data sets that all ranks read, and of whose samples each rank keeps its part of every batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Sampler

from lightning_autosync.errors import PlanError
from lightning_autosync.strategy.shares.cuts import Cut
from lightning_autosync.strategy.shares.sampler import Dealer, Position


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
        self._total = self._ranks = self._rank = 0
        self._counts: Callable[[int], Sequence[int]] | Sequence[int] = ()

    def cut(self, counts: Callable[[int], Sequence[int]] | Sequence[int], total: int, ranks: int, rank: int) -> None:
        """Keep the samples of ``rank``.

        Args:
            counts: the samples of each rank in a batch; as a function, of the number of the batch in its pass.
            total: number of samples of all ranks in a batch.
        """
        self._counts, self._total, self._ranks, self._rank = counts, total, ranks, rank

    def __len__(self) -> int:
        samples = len(self._stream)  # type: ignore[arg-type]  # a TypeError says that there is no length
        # A data loader divides this number by its own batch size.
        return samples // self._total * (self._total // self._ranks) if self._total else samples

    def __iter__(self) -> Iterator[Any]:
        if not self._total:  # on a single rank, or without shares
            yield from self._stream
            return
        stream = iter(self._stream)
        for number in count():
            batch = list(islice(stream, self._total))
            if len(batch) < self._total:
                return
            counts = self._counts(number) if callable(self._counts) else self._counts
            start = sum(counts[: self._rank])
            yield from batch[start : start + counts[self._rank]]


class StreamBatches(Sampler[list[None]], ABC):
    """Tells a data loader how many samples of a stream make each batch of this rank."""

    @abstractmethod
    def take(self) -> Cut:
        """The cut of the next batch that the data loader returned; call it once for each batch."""


class FixedStreamBatches(StreamBatches):
    """Batches of a stream with shares that never change.

    Args:
        counts: samples of each rank in a global batch.
    """

    def __init__(self, counts: Sequence[int], rank: int) -> None:
        self._cut = Cut(counts[rank], sum(counts), len(counts))

    def __iter__(self) -> Iterator[list[None]]:
        while True:
            yield [None] * self._cut.samples

    def take(self) -> Cut:
        return self._cut


class ChangingStreamBatches(StreamBatches):
    """Batches of a stream with shares that change, only for a data loader without workers.

    Args:
        dealer: says how batches are cut.
        total: number of samples of all ranks in a batch.
    """

    def __init__(self, dealer: Dealer, total: int) -> None:
        self._dealer, self._total = dealer, total
        self._cuts: deque[Cut] = deque()
        self._position: Position = (-1, 0)

    @property
    def position(self) -> Position:
        """The next global batch to be cut."""
        return self._position

    def counts(self, batch: int) -> Sequence[int]:
        """The samples of each rank in a batch of the present pass."""
        return self._dealer.counts((self._position[0], batch), self._total)

    def __iter__(self) -> Iterator[list[None]]:
        number = self._dealer.begin_pass()
        cuts: deque[Cut] = deque()
        self._cuts = cuts
        self._position = (number, 0)
        for batch in count():
            counts = self.counts(batch)
            cuts.append(Cut(counts[self._dealer.rank], self._total, len(counts)))
            self._position = (number, batch + 1)
            yield [None] * counts[self._dealer.rank]

    def take(self) -> Cut:
        return self._cuts.popleft()


def cut_stream(loader: DataLoader[Any], counts: Sequence[int], rank: int) -> FixedStreamBatches:
    """Let a data loader of a `GlobalStream` load this rank's samples; returns its new batch sampler.

    Raises:
        PlanError: the data loader would return batches that are not full.
    """
    _stream_of(loader).cut(counts, sum(counts), len(counts), rank)
    return FixedStreamBatches(counts, rank)


def cut_stream_anew(loader: DataLoader[Any], dealer: Dealer, total: int, ranks: int) -> ChangingStreamBatches:
    """The same with the shares of a ``dealer``, which may change.

    Raises:
        PlanError: the data loader would return batches that are not full, or has workers.
    """
    stream = _stream_of(loader)
    if loader.num_workers:
        raise PlanError(
            f"batch_shares='auto': the shares of a GlobalStream cannot change with num_workers={loader.num_workers}, "
            "because workers of the data loader cut it; use num_workers=0, or give a share for each rank"
        )
    batches = ChangingStreamBatches(dealer, total)
    stream.cut(batches.counts, total, ranks, dealer.rank)
    return batches


def _stream_of(loader: DataLoader[Any]) -> GlobalStream:
    if not loader.drop_last:
        raise PlanError("batch_shares: a GlobalStream needs DataLoader(drop_last=True), because its end is not known")
    assert isinstance(loader.dataset, GlobalStream)
    return loader.dataset
