"""Dense messages over the backend's collectives: in one level, in two levels, or through owners of ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autosync.engine.codecs import make_codec
from lightning_autosync.engine.codecs.casts import CastCodec
from lightning_autosync.engine.collectives import all_gather_single, new_group
from lightning_autosync.engine.exchanges.base import CodedRange, Exchange, new_residual
from lightning_autosync.engine.profiling import profiled
from lightning_autosync.plan.schedule import AllReduce, AllToAll, Message, TwoLevelAllReduce


class AllReduceExchange(Exchange):
    """All-reduces over ranges of the buffer. With a cast, 16-bit elements are sent and summed.

    Args:
        transfers: the ranges.
        message: the message.
        buffer: [numel + tail].
        group: the ranks; None is the default group.
    """

    def __init__(
        self,
        transfers: Sequence[AllReduce],
        message: Message,
        buffer: Tensor,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._group = group
        self._buffer = buffer
        codec = make_codec(message.compressor, buffer.numel(), message.tail)
        self._codec = codec if isinstance(codec, CastCodec) else None
        self._wire = torch.empty_like(buffer, dtype=self._codec.dtype) if self._codec is not None else buffer
        self.residual = new_residual(message, buffer)
        self._body = buffer.numel() - message.tail
        self._ranges = [self._wire[transfer.start : transfer.stop] for transfer in transfers]
        self._works: list[dist.Work] = []
        self._watcher: Callable[[], None] | None = None

    def watch(self, completed: Callable[[], None] | None) -> None:
        self._watcher = completed

    def start(self) -> None:
        if self._codec is not None:
            self._narrow(self._codec)
        self._works = [dist.all_reduce(part, group=self._group, async_op=True) for part in self._ranges]
        for work in self._works:
            _watch(work, self._watcher)

    @property
    def has_come(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if self._codec is not None:
            self._buffer.copy_(self._wire)

    def _narrow(self, codec: CastCodec) -> None:
        """Cast the buffer; with error feedback, add the residual before, and store the new loss in it."""
        if self.residual is None:
            codec.cast(self._buffer, self._wire)
            return
        self.residual[: self._body] += self._buffer[: self._body]
        self.residual[self._body :] = self._buffer[self._body :]
        codec.cast(self.residual, self._wire)
        torch.sub(self.residual, self._wire, out=self.residual).nan_to_num_(0.0, 0.0, 0.0)


class AllToAllExchange(Exchange):
    """Each owner sums its ranges: one uneven all-to-all sends contributions, a second one returns sums."""

    def __init__(
        self,
        transfer: AllToAll,
        message: Message,
        buffer: Tensor,
        rank: int,
        world_size: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._group = group
        self._rank = rank
        self._name = message.name
        self.residual = new_residual(message, buffer)
        tail_start = buffer.numel() - message.tail
        self._parts: list[list[CodedRange]] = [[] for _ in range(world_size)]
        for owner, start, stop in zip(transfer.owners, transfer.bounds, transfer.bounds[1:], strict=False):
            if stop > start:
                self._parts[owner].append(
                    CodedRange(buffer, start, stop, tail_start, message.compressor, self.residual)
                )
        self._sizes = [sum(part.wire.numel() for part in parts) for parts in self._parts]
        self._own = self._sizes[rank]
        encoded = any(part.encoded for parts in self._parts for part in parts)
        unit = torch.uint8 if encoded else buffer.dtype
        self._contributions = torch.empty(sum(self._sizes), dtype=unit, device=buffer.device)
        self._received = torch.empty(self._own * world_size, dtype=unit, device=buffer.device)
        self._work: dist.Work | None = None
        self._watcher: Callable[[], None] | None = None

    def start(self) -> None:
        for owner, chunk in enumerate(self._contributions.split(self._sizes)):
            # This rank's own contribution stays in its buffer, without a loss from encoding.
            if owner != self._rank:
                _pack(self._parts[owner], chunk)
        self._work = self._exchange(self._received, self._contributions, self._own_blocks, self._sizes)

    def resume(self) -> None:
        assert self._work is not None
        with profiled(self._name, "wait"):
            self._work.wait()
        with profiled(self._name, "reduce"):
            self._sum_received()
        self._work = self._exchange(self._contributions, self._received, self._sizes, self._own_blocks)
        _watch(self._work, self._watcher)

    def _sum_received(self) -> None:
        blocks = self._received.view(len(self._sizes), self._own)
        for sender, block in enumerate(blocks):
            if sender != self._rank:
                _add(self._parts[self._rank], block)
        _pack(self._parts[self._rank], blocks[self._rank])
        # A clone, because the source is one of the rows that are written.
        blocks[:] = blocks[self._rank].clone()

    def watch(self, completed: Callable[[], None] | None) -> None:
        self._watcher = completed

    def wait(self) -> None:
        assert self._work is not None
        self._work.wait()
        for parts, chunk in zip(self._parts, self._contributions.split(self._sizes), strict=True):
            for part, wire in _split(parts, chunk):
                part.wire.copy_(wire)
                part.decode()

    @property
    def _own_blocks(self) -> list[int]:
        return [self._own] * len(self._sizes)

    def _exchange(self, output: Tensor, source: Tensor, output_sizes: list[int], source_sizes: list[int]) -> dist.Work:
        return dist.all_to_all_single(output, source, output_sizes, source_sizes, group=self._group, async_op=True)


def _split(parts: Sequence[CodedRange], chunk: Tensor) -> Iterator[tuple[CodedRange, Tensor]]:
    return zip(parts, chunk.split([part.wire.numel() for part in parts]), strict=True)


def _pack(parts: Sequence[CodedRange], chunk: Tensor) -> None:
    for part, wire in _split(parts, chunk):
        part.encode()
        wire.copy_(part.wire)


def _add(parts: Sequence[CodedRange], chunk: Tensor) -> None:
    for part, wire in _split(parts, chunk):
        part.add(part.aligned(wire))


def _watch(work: dist.Work, completed: Callable[[], None] | None) -> None:
    """Let the backend call ``completed`` when ``work`` is complete."""
    if completed is not None:
        work.get_future().add_done_callback(lambda _: completed())


@dataclass
class TwoLevelGroups:
    """The process groups of one rank.

    Attributes:
        place: the group of the ranks in this rank's place.
        rail: the group of the ranks with this rank's seat, one in each place.
        seats: number of ranks per place.
        users: number of open engines that use them.
    """

    place: dist.ProcessGroup
    rail: dist.ProcessGroup
    seats: int
    users: int = 0

    def leave(self) -> None:
        """Note that an engine uses them no longer."""
        self.users -= 1


_made: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[tuple[int, ...], ...], TwoLevelGroups]] = WeakKeyDictionary()
"""Groups by default group and places. Until `destroy_unused_groups`, later engines use them again."""


def two_level_groups(places: Sequence[Sequence[int]], timeout: float) -> TwoLevelGroups:
    """This rank's groups for two-level collectives; the first call makes them, collectively.

    Args:
        places: the ranks of each place.
        timeout: seconds that ranks wait for each other, for groups that are made now.
    """
    assert dist.group.WORLD is not None
    made = _made.setdefault(dist.group.WORLD, {})
    key = tuple(tuple(ranks) for ranks in places)
    if key not in made:
        made[key] = _make(key, timedelta(seconds=timeout))
    return made[key]


def destroy_unused_groups() -> None:
    """Destroy the groups for two-level collectives that no open engine uses; all ranks call it at the same place."""
    if not dist.is_initialized():
        return
    assert dist.group.WORLD is not None
    made = _made.get(dist.group.WORLD, {})
    for key in [key for key, groups in made.items() if not groups.users]:
        groups = made.pop(key)
        for group in (groups.place, groups.rail):
            dist.destroy_process_group(group)


def _make(places: Sequence[Sequence[int]], timeout: timedelta) -> TwoLevelGroups:
    rank = dist.get_rank()
    seats = len(places[0])
    # `new_group` is collective over all ranks: every rank makes every group in the same order, and keeps its own two.
    inner = {tuple(ranks): new_group(timeout, ranks) for ranks in places}
    rails = [tuple(ranks[seat] for ranks in places) for seat in range(seats)]
    outer = {ranks: new_group(timeout, ranks) for ranks in rails}
    return TwoLevelGroups(
        place=next(group for ranks, group in inner.items() if rank in ranks),
        rail=next(group for ranks, group in outer.items() if rank in ranks),
        seats=seats,
    )


class TwoLevelExchange(Exchange):
    """Reduce-scatter within each place, all-reduce between places, then all-gather within each place.

    On CUDA the three collectives run on a side stream while backward continues; elsewhere ``start`` blocks.
    """

    def __init__(self, transfers: Sequence[TwoLevelAllReduce], buffer: Tensor, groups: TwoLevelGroups) -> None:
        self._groups = groups
        self._parts = [_PaddedRange(buffer[transfer.start : transfer.stop], groups.seats) for transfer in transfers]
        self._stream = torch.cuda.Stream(buffer.device) if buffer.is_cuda else None

    def start(self) -> None:
        if self._stream is not None:
            # Backward's stream may not have written all gradients yet.
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with self._beside():
            for part in self._parts:
                part.reduce(self._groups)

    def wait(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _beside(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()


class _PaddedRange:
    """A range, padded so that all seats of a place take equal shares."""

    def __init__(self, values: Tensor, seats: int) -> None:
        share = -(-values.numel() // seats)
        self._values = values
        self._padded = values if share * seats == values.numel() else values.new_zeros(share * seats)
        self._share = values.new_zeros(share)

    def reduce(self, groups: TwoLevelGroups) -> None:
        if self._padded is not self._values:
            self._padded[: self._values.numel()] = self._values
        dist.reduce_scatter_tensor(self._share, self._padded, group=groups.place)
        dist.all_reduce(self._share, group=groups.rail)
        all_gather_single(self._padded, self._share, group=groups.place)
        if self._padded is not self._values:
            self._values.copy_(self._padded[: self._values.numel()])
