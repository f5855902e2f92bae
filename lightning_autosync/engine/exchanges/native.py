"""Dense messages by the backend's own collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autosync.engine.codecs import CAST_TYPES, Codec, Residual, cast, make_codec
from lightning_autosync.engine.exchanges.base import Exchange
from lightning_autosync.plan.schedule import AllReduce, AllToAll, Message


class AllReduceExchange(Exchange):
    """All-reduces over ranges of the buffer; casts travel and are summed in sixteen bits."""

    def __init__(
        self,
        transfers: Sequence[AllReduce],
        message: Message,
        buffer: Tensor,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._group = group
        self._buffer = buffer
        kind = message.compressor.kind
        self._wire = torch.empty_like(buffer, dtype=CAST_TYPES[kind]) if kind in CAST_TYPES else buffer
        keeps = kind in CAST_TYPES and message.compressor.error_feedback
        self.residual = Residual(buffer) if keeps else None
        self._body = buffer.numel() - message.tail
        self._ranges = [self._wire[transfer.start : transfer.stop] for transfer in transfers]
        self._works: list[dist.Work] = []
        self._watcher: Callable[[], None] | None = None

    def watch(self, completed: Callable[[], None] | None) -> None:
        self._watcher = completed

    def start(self) -> None:
        if self._wire is not self._buffer:
            self._narrow()
        self._works = [dist.all_reduce(part, group=self._group, async_op=True) for part in self._ranges]
        for work in self._works:
            _watch(work, self._watcher)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if self._wire is not self._buffer:
            self._buffer.copy_(self._wire)

    def _narrow(self) -> None:
        if self.residual is None:
            cast(self._buffer, self._wire)
            return
        lost = self.residual.values
        lost[: self._body] += self._buffer[: self._body]
        lost[self._body :] = self._buffer[self._body :]
        cast(lost, self._wire)
        torch.sub(lost, self._wire, out=lost).nan_to_num_(0.0, 0.0, 0.0)


class AllToAllExchange(Exchange):
    """Owners reduce their ranges: contributions go out in one uneven all-to-all, sums come back in another."""

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
        lossy = message.compressor.kind not in ("none", "powersgd")
        self.residual = Residual(buffer) if lossy and message.compressor.error_feedback else None
        tail_start = buffer.numel() - message.tail
        self._parts: list[list[_Part]] = [[] for _ in range(world_size)]
        for owner, start, stop in zip(transfer.owners, transfer.bounds, transfer.bounds[1:], strict=False):
            if stop > start:
                self._parts[owner].append(_Part(buffer, start, stop, tail_start, message, self.residual))
        sizes = [sum(part.size for part in parts) for parts in self._parts]
        self._own = sizes[rank]
        self._sizes = sizes
        unit = self._parts_dtype(message, buffer)
        self._contributions = torch.empty(sum(sizes), dtype=unit, device=buffer.device)
        self._received = torch.empty(self._own * world_size, dtype=unit, device=buffer.device)
        self._work: dist.Work | None = None
        self._watcher: Callable[[], None] | None = None

    @staticmethod
    def _parts_dtype(message: Message, buffer: Tensor) -> torch.dtype:
        return buffer.dtype if message.compressor.kind in ("none", "powersgd") else torch.uint8

    def start(self) -> None:
        for owner, chunk in enumerate(self._contributions.split(self._sizes)):
            if owner != self._rank:
                self._pack(self._parts[owner], chunk)
        self._work = self._exchange(self._received, self._contributions, self._own_blocks, self._sizes)

    def resume(self) -> None:
        assert self._work is not None
        self._work.wait()
        blocks = self._received.view(len(self._sizes), self._own)
        for sender, block in enumerate(blocks):
            if sender != self._rank:
                self._add(block)
        self._pack(self._parts[self._rank], blocks[self._rank])
        blocks[:] = blocks[self._rank].clone()
        self._work = self._exchange(self._contributions, self._received, self._sizes, self._own_blocks)
        _watch(self._work, self._watcher)

    def watch(self, completed: Callable[[], None] | None) -> None:
        self._watcher = completed

    def wait(self) -> None:
        assert self._work is not None
        self._work.wait()
        for owner, chunk in enumerate(self._contributions.split(self._sizes)):
            position = 0
            for part in self._parts[owner]:
                part.read(chunk[position : position + part.size])
                position += part.size

    @property
    def _own_blocks(self) -> list[int]:
        return [self._own] * len(self._sizes)

    def _exchange(self, output: Tensor, source: Tensor, output_sizes: list[int], source_sizes: list[int]) -> dist.Work:
        return dist.all_to_all_single(output, source, output_sizes, source_sizes, group=self._group, async_op=True)

    def _pack(self, parts: Sequence[_Part], chunk: Tensor) -> None:
        position = 0
        for part in parts:
            part.write(chunk[position : position + part.size])
            position += part.size

    def _add(self, block: Tensor) -> None:
        position = 0
        for part in self._parts[self._rank]:
            part.add(block[position : position + part.size])
            position += part.size


def _watch(work: dist.Work, completed: Callable[[], None] | None) -> None:
    """Call ``completed`` when the backend is done with ``work``."""
    if completed is not None:
        work.get_future().add_done_callback(lambda _: completed())


class _Part:
    """A range with one owner, and its form on the wire."""

    def __init__(
        self,
        buffer: Tensor,
        start: int,
        stop: int,
        tail_start: int,
        message: Message,
        residual: Residual | None,
    ) -> None:
        self._values = buffer[start:stop]
        tail = min(stop - start, max(0, stop - tail_start))
        self._codec: Codec | None = make_codec(message.compressor, stop - start, tail)
        self._residual = (residual, residual.values[start:stop]) if residual is not None else None
        self._decoded = torch.empty_like(self._values) if self._codec is not None else None
        self._encoded = torch.empty(self._codec.size, dtype=torch.uint8, device=buffer.device) if self._codec else None
        self.size = self._codec.size if self._codec is not None else stop - start

    def write(self, wire: Tensor) -> None:
        if self._codec is None:
            wire.copy_(self._values)
            return
        # Neighbours on the wire may start at any byte; a buffer of its own is aligned.
        assert self._encoded is not None
        if self._residual is not None:
            memory, view = self._residual
            memory.encode(self._codec, self._values, view, self._encoded)
        else:
            self._codec.encode(self._values, self._encoded)
        wire.copy_(self._encoded)

    def read(self, wire: Tensor) -> None:
        if self._codec is None:
            self._values.copy_(wire)
            return
        assert self._encoded is not None
        self._encoded.copy_(wire)
        self._codec.decode(self._encoded, self._values)

    def add(self, wire: Tensor) -> None:
        if self._codec is None:
            self._values.add_(wire)
            return
        assert self._encoded is not None
        assert self._decoded is not None
        self._encoded.copy_(wire)
        self._codec.decode(self._encoded, self._decoded)
        self._values.add_(self._decoded)
