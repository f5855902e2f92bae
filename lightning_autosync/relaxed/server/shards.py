"""A worker's copy of the parameters, accessed by shard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from lightning_autosync.engine.exchanges.rows import Rows
from lightning_autosync.engine.row_gradients import touched_rows
from lightning_autosync.plan.servers import Piece, ServerLayout, Shard
from lightning_autosync.relaxed.server.gradients import DenseGradient, Gradients, unpack_rows
from lightning_autosync.relaxed.transport.payload import Unpacked


class ShardedModel:
    """The parameters of one worker.

    Args:
        parameters: parameters by name; they include all variables of the layout.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], layout: ServerLayout) -> None:
        self._parameters = dict(parameters)
        self._layout = layout

    def slices(self, shard: Shard) -> Tensor:
        """A copy of the parameters [numel] of a shard, on the CPU."""
        parts = [
            elements(self._parameters[piece.variable].detach(), shard.axis, piece).reshape(-1) for piece in shard.pieces
        ]
        return torch.cat(parts).cpu()

    def gradients(self, shards: Iterable[Shard]) -> Gradients:
        """The gradients of some shards, on the CPU; views of ``parameter.grad`` where possible."""
        found: Gradients = {}
        tables: dict[str, Rows | None] = {}
        for shard in shards:
            if shard.width:
                variable = shard.pieces[0].variable
                if variable not in tables:
                    tables[variable] = self._rows(variable, shard.width)
                rows = tables[variable]
                if rows is not None:
                    found[shard.index] = rows.between(shard.first_row, shard.first_row + shard.rows)
            else:
                parts = tuple(self._part(shard, piece) for piece in shard.pieces)
                counts = tuple(int(part is not None) for part in parts)
                if any(counts):
                    found[shard.index] = DenseGradient(parts, counts)
        return found

    @torch.no_grad()
    def install(self, message: Unpacked, shards: Iterable[Shard]) -> None:
        """Copy the values in a server's answer into the parameters of its shards."""
        for shard in shards:
            flat = message.tensors.get(str(shard.index))
            rows = unpack_rows(message, shard) if shard.width else None
            if rows is not None:
                parameter = self._parameters[shard.pieces[0].variable]
                values = rows.values.view(-1, *parameter.shape[1:])
                parameter.data[rows.indices.to(parameter.device)] = values.to(parameter.device)
            elif flat is not None:
                parts = torch.split(flat, [piece.numel for piece in shard.pieces])
                for piece, part in zip(shard.pieces, parts, strict=True):
                    assign(self._parameters[piece.variable].data, shard.axis, piece, part)

    def _part(self, shard: Shard, piece: Piece) -> Tensor | None:
        gradient = self._parameters[piece.variable].grad
        if gradient is None:
            return None
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        return elements(gradient.detach(), shard.axis, piece).reshape(-1).cpu()

    def _rows(self, variable: str, width: int) -> Rows | None:
        gradient = self._parameters[variable].grad
        if gradient is None:
            return None
        if gradient.is_sparse:
            gradient = gradient.detach().coalesce()
            indices, values = gradient.indices()[0], gradient.values().reshape(-1, width)
        else:
            table = gradient.detach().reshape(-1, width)
            indices = touched_rows(table)
            values = table[indices]
        return Rows(indices.cpu(), values.cpu(), gradients=1)


def elements(tensor: Tensor, axis: int, piece: Piece) -> Tensor:
    """The elements of a piece: slices along ``axis``, or with axis 0 a flat range (a copy if not contiguous)."""
    if axis:
        length = tensor.numel() // tensor.shape[axis]
        return tensor.movedim(axis, 0)[piece.start // length : piece.stop // length]
    return tensor.reshape(-1)[piece.start : piece.stop]


def assign(tensor: Tensor, axis: int, piece: Piece, values: Tensor) -> None:
    if axis or tensor.is_contiguous():
        place = elements(tensor, axis, piece)
        place.copy_(values.view(place.shape))
    else:
        flat = tensor.reshape(-1)
        flat[piece.start : piece.stop] = values.to(flat.device)
        tensor.copy_(flat.view(tensor.shape))
