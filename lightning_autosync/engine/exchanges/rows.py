"""Row-wise messages, which send only rows that some rank touched. Sums are exact, over trees or the backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autosync.engine.exchanges.base import byte_view
from lightning_autosync.engine.exchanges.trees import TransportSteps
from lightning_autosync.engine.profiling import profiled
from lightning_autosync.engine.transport import DOWN, UP, Frame, Peer, Transport
from lightning_autosync.errors import ExchangeError
from lightning_autosync.plan.schedule import Message, TreeTransfer, index_bytes

_COUNT_BYTES = 8
"""Bytes of the number of gradients."""
_INDICES = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers that hold indices on the wire, by their bytes; those of 2 and 4 bytes count as unsigned."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a table.

    Attributes:
        indices: [count], int64, ascending and unique.
        values: [count, width].
        gradients: number of ranks with a gradient, even if it has no rows. In a sum, a negative number means that some
            rank's parameters changed (see `MessageGradients.change_seen`).
    """

    indices: Tensor
    values: Tensor
    gradients: int

    def between(self, start: int, stop: int) -> Rows:
        """The rows with indices in ``[start, stop)``."""
        edges = torch.searchsorted(self.indices, torch.tensor([start, stop], device=self.indices.device))
        chosen = slice(int(edges[0]), int(edges[1]))
        return Rows(self.indices[chosen], self.values[chosen], self.gradients)

    def packed(self, table: int, *header: int) -> Tensor:
        """The rows of a table of ``table`` rows as uint8: the header as int64, values, indices.

        The header is by default the number of gradients.
        """
        # Values come first, where they are aligned: indices may have fewer bytes than an element.
        front = self.indices.new_tensor(header or [self.gradients])
        indices = self.indices.to(_INDICES[index_bytes(table)])
        return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in (front, self.values, indices)])

    @staticmethod
    def unpacked(wire: Tensor, width: int, dtype: torch.dtype, table: int) -> Rows:
        """The rows that `packed` wrote into ``wire``, with values as views."""
        size = index_bytes(table)
        count = (wire.numel() - _COUNT_BYTES) // (size + width * dtype.itemsize)
        front, values, indices = wire.split([_COUNT_BYTES, count * width * dtype.itemsize, count * size])
        found = indices.clone().view(_INDICES[size]).to(torch.int64)
        if size < 8:
            found &= 2 ** (8 * size) - 1
        return Rows(found, values.view(dtype).view(count, width), int(front.view(torch.int64)))


def add_rows(parts: list[Rows]) -> Rows:
    """The sum of several sets of rows, added in the given order, so that the result is reproducible."""
    if len(parts) == 1:
        return parts[0]
    indices, places = torch.unique(torch.cat([part.indices for part in parts]), return_inverse=True)
    sums = parts[0].values.new_zeros(indices.numel(), parts[0].values.shape[1])
    for part, rows in zip(parts, places.split([part.indices.numel() for part in parts]), strict=True):
        # Indices within a part are unique, so no two additions hit the same row, on any device.
        # A parameter that has just changed its dtype has rows of another one.
        sums.index_add_(0, rows, part.values.to(sums.dtype))
    return Rows(indices, sums, sum(part.gradients for part in parts))


class RowExchange(ABC):
    """Sums rows over all ranks; methods as in `Exchange`, with rows instead of a buffer."""

    @abstractmethod
    def start(self, rows: Rows) -> None:
        """Begin the exchange with this rank's rows."""

    def resume(self) -> None:  # noqa: B027 - trees have nothing left to launch
        """See `Exchange.resume`."""

    def watch(self, completed: Callable[[], None] | None) -> None:  # noqa: B027 - not all know it before `wait`
        """See `Exchange.watch`."""

    @property
    def has_come(self) -> bool:
        """See `Exchange.has_come`."""
        return False

    @abstractmethod
    def wait(self) -> Rows:
        """Block until the sum is complete; returns all rows that some rank touched.

        Raises:
            ExchangeError: a peer was lost, ran another step, or did not answer in time.
        """


@dataclass
class _Path:
    """One transfer from this rank's view, with the contributions that have arrived."""

    number: int
    transfer: TreeTransfer
    first_row: int
    last_row: int
    gathering: int = 1
    contributions: dict[int, Rows] = field(default_factory=dict)
    incoming: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    own: Rows | None = None
    total: Rows | None = None


class RowTreeExchange(TransportSteps, RowExchange):
    """Rows along trees: merged on the way up; the union is broadcast on the way down."""

    def __init__(
        self,
        transport: Transport,
        channel: int,
        rank: int,
        message: Message,
        width: int,
        dtype: torch.dtype,
        timeout: float,
    ) -> None:
        super().__init__(transport, channel, message, timeout)
        self._rank = rank
        self._width = width
        self._dtype = dtype
        self._table = message.rows
        self._row_bytes = index_bytes(message.rows) + width * dtype.itemsize
        self._paths = [
            _Path(number, transfer, transfer.start // width, transfer.stop // width)
            for number, transfer in enumerate(message.rounds[0].transfers)
            if isinstance(transfer, TreeTransfer)
        ]
        self._work = sum(1 + len(path.transfer.broadcast.children[rank]) for path in self._paths)
        transport.register(channel, self)

    def start(self, rows: Rows) -> None:
        self._launch(lambda: self._begin(rows))

    def wait(self) -> Rows:
        self._completion.wait()
        totals = [path.total for path in self._paths if path.total is not None]
        indices = torch.cat([rows.indices for rows in totals])
        return Rows(indices, torch.cat([rows.values for rows in totals]), totals[0].gradients)

    def _begin(self, rows: Rows) -> None:
        if not self._enter_step(self._work):
            return
        for path in self._paths:
            path.own = rows.between(path.first_row, path.last_row)
            self._send_up_if_complete(path)

    def destination(self, peer: int, frame: Frame) -> memoryview:
        path = self._path(peer, frame)
        self._check_step(peer, frame, path.gathering if frame.phase == UP else self._step)
        count, rest = divmod(frame.size - _COUNT_BYTES, self._row_bytes)
        if rest or count < 0 or count > path.last_row - path.first_row:
            raise ExchangeError(f"rank {peer} sent {frame.size} bytes of rows, which fit no part of this table")
        wire = torch.empty(frame.size, dtype=torch.uint8)
        path.incoming[peer, frame.phase] = wire
        return byte_view(wire)

    def arrived(self, peer: int, frame: Frame) -> None:
        path = self._path(peer, frame)
        wire = path.incoming.pop((peer, frame.phase))
        rows = Rows.unpacked(wire, self._width, self._dtype, self._table)
        outside = rows.indices.numel() and (
            int(rows.indices[0]) < path.first_row or int(rows.indices[-1]) >= path.last_row
        )
        if outside:
            raise ExchangeError(f"rank {peer} sent rows outside of [{path.first_row}, {path.last_row})")
        if frame.phase == DOWN:
            with profiled(self._name, "broadcast"):
                self._send_down(path, rows, wire)
        else:
            path.contributions[peer] = rows
            self._send_up_if_complete(path)

    def _path(self, peer: int, frame: Frame) -> _Path:
        if frame.transfer >= len(self._paths):
            raise ExchangeError(f"rank {peer} sent rows that are not in the schedule")
        path = self._paths[frame.transfer]
        children = path.transfer.reduce.children[self._rank]
        expected = children if frame.phase == UP else (path.transfer.broadcast.parents[self._rank],)
        if peer not in expected or (peer in path.contributions and frame.phase == UP):
            raise ExchangeError(f"rank {peer} sent rows that are not in the schedule")
        return path

    def _send_up_if_complete(self, path: _Path) -> None:
        children = path.transfer.reduce.children[self._rank]
        # Children that are a step ahead send before this rank has begun the step. `_begin` then calls this again.
        if path.own is None or len(path.contributions) < len(children):
            return
        with profiled(self._name, "reduce"):
            total = add_rows([path.own, *(path.contributions[child] for child in children)])
        path.own = None
        path.contributions.clear()
        path.gathering += 1
        wire = total.packed(self._table)
        tree = path.transfer.reduce
        parent = tree.parents[self._rank]
        if parent < 0:
            with profiled(self._name, "broadcast"):
                self._send_down(path, total, wire)
        else:
            self._send(Peer(parent, tree.interface), (path.number, 0, UP), byte_view(wire))

    def _send_down(self, path: _Path, total: Rows, wire: Tensor) -> None:
        path.total = total
        tree = path.transfer.broadcast
        for child in tree.children[self._rank]:
            self._send(Peer(child, tree.interface), (path.number, 0, DOWN), byte_view(wire), sent=self._progress)
        self._progress()


class NativeRowExchange(RowExchange):
    """Rows over the backend: each rank gathers the rows of all ranks and adds them up."""

    def __init__(
        self, table: int, width: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        self._table = table
        self._width = width
        self._dtype = dtype
        self._group = group
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        self._counts = [torch.zeros_like(self._count) for _ in range(dist.get_world_size(group))]
        self._wire: Tensor | None = None
        self._gathered: list[Tensor] = []
        self._sizes: list[int] = []
        self._work: dist.Work | None = None

    def start(self, rows: Rows) -> None:
        self._wire = rows.packed(self._table)
        self._count.fill_(self._wire.numel())
        self._work = dist.all_gather(self._counts, self._count, group=self._group, async_op=True)

    def resume(self) -> None:
        assert self._work is not None
        assert self._wire is not None
        self._work.wait()
        self._sizes = [int(count) for count in self._counts]
        # All-gathers need tensors of one size, so each rank pads its rows to the largest size.
        padded = self._wire.new_zeros(max(1, *self._sizes))
        padded[: self._wire.numel()] = self._wire
        self._gathered = [torch.empty_like(padded) for _ in self._sizes]
        self._work = dist.all_gather(self._gathered, padded, group=self._group, async_op=True)

    def wait(self) -> Rows:
        assert self._work is not None
        self._work.wait()
        parts = zip(self._gathered, self._sizes, strict=True)
        return add_rows([Rows.unpacked(wire[:size], self._width, self._dtype, self._table) for wire, size in parts])
