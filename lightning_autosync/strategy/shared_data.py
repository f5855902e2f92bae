"""One pass over the data, dealt out batch by batch, so that faster workers take more.

With a fixed share per worker, an epoch lasts as long as its slowest worker, and the time that relaxed consistency gains
within the epoch is lost at its end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

from lightning_autosync.errors import ExchangeError, PlanError
from lightning_autosync.relaxed.transport.mesh import Mesh
from lightning_autosync.relaxed.transport.messages import Mail
from lightning_autosync.strategy.agreement import agree
from lightning_autosync.strategy.shares.parts import leaves

_DEALER = 0
"""The rank that deals out data. Relaxed training cannot continue without rank 0 anyway."""
_KEPT = 2
"""Number of passes that are remembered: a slow worker may still ask for data of the previous one."""


class SharedWork:
    """Deals out each position ``0 .. length - 1`` of a pass once.

    Each worker's first portion is reserved for it (`first`); the rest goes to workers that ask (`take`). A worker
    without any batch would skip what a training loop does after its last batch, and the others would wait for it there.

    Args:
        mesh: the mesh of all workers, followed by servers. Every worker must make this object before any calls `take`.
        workers: number of workers; all of them ask for portions of the same size.
        timeout: seconds to wait for the dealing rank.
    """

    def __init__(self, mesh: Mesh, workers: int, timeout: float) -> None:
        self._mesh = mesh
        self._workers = workers
        self._timeout = timeout
        self._next: dict[int, int] = {}
        self._lock = threading.Lock()
        if mesh.rank == _DEALER:
            self._unsubscribe = mesh.subscribe("work?", self._answer)

    def close(self) -> None:
        """Stop dealing; a second call has no effect."""
        if self._mesh.rank == _DEALER:
            self._unsubscribe()

    def first(self, length: int, count: int) -> range:
        """This worker's first ``count`` positions of any pass, which are reserved for it."""
        start = min(length, self._mesh.rank * count)
        return range(start, min(length, start + count))

    def take(self, epoch: int, length: int, count: int) -> range:
        """The next ``count`` positions of a pass, after all first portions; fewer at its end, and none after it.

        Raises:
            ExchangeError: the dealing rank was lost or did not answer in time.
        """
        if self._mesh.rank == _DEALER:
            return self._deal(epoch, length, count)
        self._mesh.send(_DEALER, "work?", {"epoch": epoch, "length": length, "count": count})
        while True:
            header = self._mesh.receive("work", sender=_DEALER, timeout=self._timeout).header
            if header["epoch"] == epoch:
                return range(header["start"], header["stop"])

    def _answer(self, mail: Mail) -> None:
        epoch = mail.header["epoch"]
        portion = self._deal(epoch, mail.header["length"], mail.header["count"])
        answer = {"epoch": epoch, "start": portion.start, "stop": portion.stop}
        with suppress(ExchangeError):  # the worker was lost, or this rank is about to leave
            self._mesh.send(mail.sender, "work", answer)

    def _deal(self, epoch: int, length: int, count: int) -> range:
        # Rank 0's own thread and the mesh's thread, which answers other ranks, both call this.
        with self._lock:
            start = self._next.get(epoch, min(length, self._workers * count))
            stop = min(length, start + count)
            self._next[epoch] = stop
            for old in [number for number in self._next if number <= epoch - _KEPT]:
                del self._next[old]
        return range(start, stop)


class SharedSampler(Sampler[int]):
    """Yields the indices of the portions that this worker takes.

    There is no ``__len__``, because the number of samples depends on the worker's speed. Lightning calls `set_epoch`.

    Args:
        work: deals out positions.
        length: number of samples in the data set.
        portion: number of samples per request, usually a batch.
        shuffle: whether each epoch has a new random order, the same on all workers.
        seed: seed of that order.
        epoch: number of the first pass.
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
        """Set the number of the next pass."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        epoch = self._epoch
        order: Any = range(self._length)
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            order = torch.randperm(self._length, generator=generator, device="cpu").tolist()
        portion = self._work.first(self._length, self._portion)
        while portion:
            yield from (order[position] for position in portion)
            portion = self._work.take(epoch, self._length, self._portion)


def share_data(dataloader: object, work: SharedWork, workers: int, epoch: int) -> int | None:
    """Deal out the samples of ``dataloader`` from pass ``epoch`` on, if it uses a plain DistributedSampler; collective.

    Returns:
        Batches per epoch and worker if all workers are equally fast, rounded up; None if nothing is dealt out.

    Raises:
        PlanError: (on every rank) there are fewer batches than ``workers``, or loaders differ between ranks.
    """
    found = agree(lambda: _batches(dataloader, workers), lambda found: {"train_dataloader": _describe(found)})
    if found is None:
        return None
    sampler: Any = found.sampler
    found.sampler = SharedSampler(work, len(sampler.dataset), found.batch_size, sampler.shuffle, sampler.seed, epoch)
    return -(-_count(len(sampler.dataset), found) // workers)


def describe_equal_shares(dataloader: object) -> str:
    """A warning that says why ``dataloader`` is not dealt out, and what that means."""
    return (
        f"train_dataloader: the batches of a {_who_draws(dataloader)} cannot be shared out during an epoch. Each rank "
        "keeps its fixed share, so faster ranks do not take more batches. To share batches out, use a DataLoader "
        "with shuffle=True or False and no sampler, and do not read trainer.estimated_stepping_batches before "
        "configure_optimizers"
    )


def _who_draws(dataloader: object) -> str:
    """The name of the type because of which `_batches` refuses the data loader."""
    if not isinstance(dataloader, DataLoader):
        return type(dataloader).__name__
    if type(dataloader.batch_sampler) not in (BatchSampler, type(None)):
        return type(dataloader.batch_sampler).__name__
    sampler = dataloader.sampler
    # For several ranks, Lightning wraps the user's sampler in a data set, over which it puts a distributed sampler.
    return type(getattr(getattr(sampler, "dataset", None), "_sampler", sampler)).__name__


def _batches(dataloader: object, workers: int) -> BatchSampler | None:
    """The batch sampler of a data loader, if its batches can be dealt out; otherwise None."""
    if not isinstance(dataloader, DataLoader) or type(dataloader.sampler) is not DistributedSampler:
        return None
    batches = dataloader.batch_sampler
    if type(batches) is not BatchSampler:
        return None
    length = len(dataloader.sampler.dataset)  # type: ignore[arg-type]
    count = _count(length, batches)
    if count < workers:
        raise PlanError(
            f"train_dataloader: {length} samples make {count} batches of {batches.batch_size}, but each of {workers} "
            "ranks needs one; use smaller batches or fewer ranks"
        )
    return batches


def _count(length: int, batches: BatchSampler) -> int:
    """Number of batches in ``length`` samples."""
    return length // batches.batch_size if batches.drop_last else -(-length // batches.batch_size)


def _describe(batches: BatchSampler | None) -> str:
    if batches is None:
        return "not dealt out"
    sampler: Any = batches.sampler
    order = f"shuffled by seed {sampler.seed}" if sampler.shuffle else "in order"
    return f"{len(sampler.dataset)} samples {order} in batches of {batches.batch_size}"


def batch_size(batch: Any) -> int:
    """Number of samples in a batch: the first axis of the first tensor in it; 1 if there is no tensor."""
    return next((len(leaf) for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)
