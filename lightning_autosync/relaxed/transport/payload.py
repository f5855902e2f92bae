"""Named tensors and plain values in one payload: a JSON directory, followed by the bytes of the tensors."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_autosync.errors import ExchangeError

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 16
"""Bytes, the size of the largest element type."""
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.complex128,
        torch.complex64,
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint64,
        torch.uint32,
        torch.uint16,
        torch.uint8,
        torch.bool,
    )
}

Part = Tensor | Sequence[Tensor]
"""A tensor, or several tensors of one dtype that the receiver gets as one flat tensor."""


Packed = list[memoryview | Tensor]
"""The parts of a payload, as `Mesh.send` takes them."""


class Unpacked(NamedTuple):
    """The contents of a payload; tensors are views of it."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]


def can_travel(tensor: Tensor) -> bool:
    """Whether `pack` accepts a tensor, which must be strided and have one of the known dtypes."""
    return tensor.layout is torch.strided and tensor.dtype in _DTYPES.values()


def pack(tensors: Mapping[str, Part], values: Mapping[str, Any] | None = None) -> Packed:
    """Pack named tensors and JSON values into a payload; contiguous CPU tensors are not copied.

    Raises:
        ExchangeError: a tensor is sparse or has an unknown dtype.
    """
    directory: list[Any] = []
    body: Packed = []
    for name, part in tensors.items():
        pieces = [part] if isinstance(part, Tensor) else list(part)
        shape = list(part.shape) if isinstance(part, Tensor) else [sum(piece.numel() for piece in pieces)]
        if not can_travel(pieces[0]):
            kind = f"{pieces[0].dtype}, {pieces[0].layout}"
            raise ExchangeError(
                f"'{name}' cannot be sent: its layout or dtype is {kind}; allowed: strided, {', '.join(_DTYPES)}"
            )
        pieces = [piece.detach().to("cpu").contiguous() for piece in pieces]
        directory.append([name, str(pieces[0].dtype).removeprefix("torch."), shape])
        body += [*pieces, _padding(sum(piece.nbytes for piece in pieces))]
    text = json.dumps([directory, values or {}], separators=(",", ":")).encode()
    head = _LENGTH.pack(len(text)) + text
    return [memoryview(head), _padding(len(head)), *body]


def unpack(payload: memoryview) -> Unpacked:
    """Unpack a payload of `pack`.

    Raises:
        ExchangeError: the payload does not have the form that `pack` writes.
    """
    try:
        (length,) = _LENGTH.unpack_from(payload)
        directory, values = json.loads(bytes(payload[_LENGTH.size : _LENGTH.size + length]))
        tensors: dict[str, Tensor] = {}
        position = _aligned(_LENGTH.size + length)
        for name, dtype_name, shape in directory:
            dtype = _DTYPES[dtype_name]
            count = math.prod(shape)
            size = count * dtype.itemsize
            # The sign needs its own check, because two negative sizes have a positive product.
            if min(shape, default=0) < 0 or position + size > payload.nbytes:
                raise ValueError(f"'{name}' does not fit into the message")
            flat = torch.empty(0, device="cpu")
            if count:
                flat = torch.frombuffer(payload, dtype=dtype, count=count, offset=position)
            tensors[name] = flat.to(dtype).view(shape)
            position = _aligned(position + size)
    except (struct.error, ValueError, KeyError, TypeError) as cause:
        raise ExchangeError(f"a message of named tensors cannot be read: {cause}") from None
    return Unpacked(tensors, values)


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT


def _padding(size: int) -> memoryview:
    return memoryview(bytes(_aligned(size) - size))
