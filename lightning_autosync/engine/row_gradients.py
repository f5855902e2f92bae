"""The gradient of one table, of which only the touched rows travel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy
import torch
from torch import Tensor, nn

from lightning_autosync.engine.exchanges.rows import RowExchange, Rows
from lightning_autosync.engine.gradients import MessageGradients, all_finite
from lightning_autosync.engine.profiling import profiled
from lightning_autosync.plan.schedule import Message

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
"""Integers by their bytes."""
_SCANNED_BYTES = 4 * 2**20
"""Bytes of a table that are searched at once. For each of its words there is a byte that tells whether it is zero."""
_MANY_WORDS = 1 / 16
"""If fewer words are not zero, their places are listed; otherwise each row is looked at."""


class RowGradients(MessageGradients):
    """The gradient of one table, such as an embedding; only rows that are not zero are exchanged.

    Args:
        message: a row-wise message.
        parameter: the table [rows, ...].
        exchange: the exchange that sums rows over ranks.
        world_size: number of ranks.
    """

    exchange: RowExchange

    def __init__(self, message: Message, parameter: nn.Parameter, exchange: RowExchange, world_size: int) -> None:
        super().__init__(message, [parameter], world_size)
        self.exchange = exchange
        self._share = 1.0 / world_size
        self._parameter = parameter
        self._width = message.numel // message.rows
        self._own: Rows | None = None
        self._total: Rows | None = None
        self._sparse_layout = message.sparse

    def arm(self, changed: bool = False) -> None:
        super().arm(changed)
        self._own = self._total = None
        self._sparse_layout = self.message.sparse

    def on_arrival(self, place: int) -> Callable[[], None]:
        return self._pack

    def _pack(self) -> None:
        if self._own is not None:
            self._refuse_second(0)
        if self._parameter.grad is None:  # an autograd function gave None for it, which counts as zeros
            self._own = replace(self._no_rows(), gradients=1)
            return
        with profiled(self.message.name, "pack"):
            self._pack_rows(self._parameter.grad.detach())

    def _pack_rows(self, gradient: Tensor) -> None:
        self._sparse_layout = gradient.is_sparse
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            indices = gradient.indices()[0]
            values = gradient.values().view(-1, self._width)
        else:
            table = gradient.reshape(self.message.rows, self._width)
            indices = touched_rows(table)
            values = table.index_select(0, indices)
        self._own = Rows(indices, values * self._share, gradients=1)

    def start(self) -> None:
        self.started = True
        if self._own is None and self._parameter.requires_grad and self._parameter.grad is not None:
            self._pack()
        own = self._no_rows() if self._own is None else self._own
        # Unchanged ranks add at most 1 each, so any changed rank makes the sum negative.
        self.exchange.start(replace(own, gradients=-self._world_size) if self._changed else own)

    def _no_rows(self) -> Rows:
        values = self._parameter.new_empty(0, self._width)
        return Rows(values.new_empty(0, dtype=torch.int64), values, gradients=0)

    def finish(self) -> None:
        with profiled(self.message.name, "wait"):
            self._total = total = self.exchange.wait()
        with profiled(self.message.name, "unpack"):
            self._unpack(total)

    def _unpack(self, total: Rows) -> None:
        parameter = self._parameter
        if total.gradients > 0 and parameter.requires_grad:
            if self._sparse_layout:
                parameter.grad = self._sparse(total)
            else:
                # The total includes all rows that this rank touched, so none of the local values remains.
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                # The gradient may have a graph, of create_graph=True.
                parameter.grad.detach()[total.indices] = total.values.view(-1, *parameter.shape[1:])

    @property
    def change_seen(self) -> bool:
        return self._total is not None and self._total.gradients < 0

    def finite(self) -> bool:
        return self._total is None or all_finite(self._total.values)

    def _sparse(self, total: Rows) -> Tensor:
        shape = self._parameter.shape
        values = total.values.view(-1, *shape[1:])
        return torch.sparse_coo_tensor(total.indices[None], values, shape, is_coalesced=True, check_invariants=False)


def touched_rows(table: Tensor) -> Tensor:
    """Ascending indices of the rows of ``table`` [rows, width] with an element that is not zero."""
    if table.device.type != "cpu" or not table.is_contiguous():
        return table.any(dim=1).nonzero().view(-1)
    length = max(1, _SCANNED_BYTES // max(1, table.shape[1] * table.itemsize))
    found = [_touched_in(table[start : start + length]) + start for start in range(0, len(table), length)]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64, device="cpu")


def _touched_in(block: Tensor) -> Tensor:
    """`touched_rows` of a contiguous part of a table on the CPU."""
    if not block.shape[1]:
        return torch.zeros(0, dtype=torch.int64, device="cpu")
    # Torch compares long words, and NumPy lists booleans, several times as fast as torch's `any` and `nonzero`.
    row_bytes, offset = block.shape[1] * block.itemsize, block.storage_offset() * block.itemsize
    size = next(size for size in (8, 4, 2, 1) if row_bytes % size == 0 and offset % size == 0)
    filled = block.view(-1).view(_WORDS[size]).ne(0).numpy()
    row_words = row_bytes // size
    if numpy.count_nonzero(filled) < _MANY_WORDS * filled.size:
        rows = torch.unique_consecutive(torch.from_numpy(numpy.flatnonzero(filled) // row_words))
        touched = block[:, 0][rows] != 0
    else:
        rows = torch.arange(len(block), device="cpu")
        touched = block[:, 0] != 0
    # In almost all touched rows the first element is not zero. In others, a word may have negative zeros only.
    others = torch.from_numpy(numpy.flatnonzero(~touched.numpy()))
    if others.numel():
        doubtful = others[torch.from_numpy(filled.reshape(-1, row_words)[rows[others].numpy()].any(axis=1))]
        touched[doubtful] = block[rows[doubtful]].any(dim=1)
    return rows[touched]
