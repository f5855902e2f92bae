"""Gradients of shards: packing, unpacking and sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_autosync.engine.exchanges.rows import Rows, add_rows
from lightning_autosync.errors import ExchangeError
from lightning_autosync.plan.servers import Shard
from lightning_autosync.relaxed.transport.payload import Packed, Part, Unpacked, pack


@dataclass(frozen=True)
class DenseGradient:
    """The gradient of a dense shard.

    Attributes:
        parts: flat elements of each piece; None for a piece without a gradient on any worker.
        counts: number of workers with a gradient, by piece.
    """

    parts: tuple[Tensor | None, ...]
    counts: tuple[int, ...]


Gradient = DenseGradient | Rows
"""The gradient of a dense or of a row-wise shard; row indices count from the first row of the whole table."""

Gradients = dict[int, Gradient]
"""Gradients by index of the shard; shards without a gradient are left out."""


def pack_gradients(gradients: Gradients) -> Packed:
    """The payload of a push."""
    tensors: dict[str, Part] = {}
    counts: dict[str, list[int]] = {}
    for index, gradient in gradients.items():
        if isinstance(gradient, Rows):
            tensors[f"{index}.rows"] = gradient.indices
            tensors[f"{index}.values"] = gradient.values
            counts[str(index)] = [gradient.gradients]
        else:
            tensors[str(index)] = [part for part in gradient.parts if part is not None]
            counts[str(index)] = list(gradient.counts)
    return pack(tensors, counts)


def unpack_gradients(message: Unpacked, shards: Mapping[int, Shard]) -> Gradients:
    """The gradients in a push, as views of its payload.

    Raises:
        ExchangeError: a gradient does not fit its shard, or the shard is not among ``shards``.
    """
    found: Gradients = {}
    for name, counts in message.values.items():
        shard = shards.get(int(name))
        if shard is None:
            raise ExchangeError(f"shard {name} is not on this server")
        if not all(type(count) is int and count >= 0 for count in counts):
            raise ExchangeError(f"shard {name}: the numbers of gradients are {counts!r}; allowed: 0, 1, 2, ...")
        if shard.width:
            found[shard.index] = _rows(message, shard, counts[0])
        else:
            found[shard.index] = _dense(message.tensors[name], shard, counts)
    return found


def unpack_rows(message: Unpacked, shard: Shard) -> Rows | None:
    """The rows of a row-wise shard in a message; None if there are none."""
    return _rows(message, shard, 0) if f"{shard.index}.rows" in message.tensors else None


def _rows(message: Unpacked, shard: Shard, gradients: int) -> Rows:
    indices, values = message.tensors[f"{shard.index}.rows"], message.tensors[f"{shard.index}.values"]
    inside = not indices.numel() or (
        int(indices[0]) >= shard.first_row
        and int(indices[-1]) < shard.first_row + shard.rows
        and bool((indices[1:] > indices[:-1]).all())
    )
    if not inside or not _are_places(indices) or list(values.shape) != [indices.numel(), shard.width]:
        raise ExchangeError(f"rows do not fit shard {shard.index} of group '{shard.group}'")
    _check_dtype(values, shard)
    return Rows(indices, values, gradients)


def _are_places(indices: Tensor) -> bool:
    """Whether a tensor can hold indices of rows: integers in one dimension."""
    kind = indices.dtype
    return indices.dim() == 1 and not (kind.is_floating_point or kind.is_complex or kind == torch.bool)


def _check_dtype(tensor: Tensor, shard: Shard) -> None:
    if tensor.dtype != getattr(torch, shard.dtype):
        raise ExchangeError(
            f"shard {shard.index} of group '{shard.group}': got elements of {tensor.dtype}; allowed: {shard.dtype}"
        )


def _dense(flat: Tensor, shard: Shard, counts: Sequence[int]) -> DenseGradient:
    sizes = [piece.numel for piece, count in zip(shard.pieces, counts, strict=True) if count]
    if sum(sizes) != flat.numel():
        raise ExchangeError(
            f"shard {shard.index} of group '{shard.group}': got {flat.numel()} elements; expected {sum(sizes)}"
        )
    _check_dtype(flat, shard)
    views = iter(torch.split(flat.view(-1), sizes))
    return DenseGradient(tuple(next(views) if count else None for count in counts), tuple(counts))


def add(gradients: Sequence[Gradients], factor: float) -> Gradients:
    """``factor`` times the sum, in new memory; added in the given order, so that the result is reproducible."""
    indices = sorted({index for one in gradients for index in one})
    return {index: _add_shard([one[index] for one in gradients if index in one], factor) for index in indices}


def _add_shard(parts: Sequence[Gradient], factor: float) -> Gradient:
    rows = [part for part in parts if isinstance(part, Rows)]
    if rows:
        total = add_rows(rows)
        return Rows(total.indices, total.values * factor, total.gradients)
    dense = [part for part in parts if isinstance(part, DenseGradient)]
    sums = tuple(_sum(pieces, factor) for pieces in zip(*(part.parts for part in dense), strict=True))
    return DenseGradient(sums, tuple(map(sum, zip(*(part.counts for part in dense), strict=True))))


def _sum(pieces: Sequence[Tensor | None], factor: float) -> Tensor | None:
    given = [piece for piece in pieces if piece is not None]
    if not given:
        return None
    total = given[0] + given[1] if len(given) > 1 else given[0].clone()
    for piece in given[2:]:
        total += piece
    return total.mul_(factor)
