"""What a codec is: a lossy, fixed-size form of a run of elements."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lightning_autosync.plan.messages import COUNT_BYTES, encoded_bytes
from lightning_autosync.plan.spec import Compressor


class Codec(ABC):
    """Encodes ``numel`` elements, the last ``tail`` of which are counts, into ``size`` bytes.

    Args:
        compressor: kind and settings.
        numel: elements, counts included.
        tail: counts at the end, which travel exact.
    """

    def __init__(self, compressor: Compressor, numel: int, tail: int) -> None:
        self.numel = numel
        self.body = numel - tail
        self.tail = tail
        self.size = encoded_bytes(compressor, numel, tail, itemsize=4)

    @abstractmethod
    def encode(self, values: Tensor, wire: Tensor) -> None:
        """Write the form of ``values`` [numel] into ``wire`` [size], uint8."""

    @abstractmethod
    def decode(self, wire: Tensor, values: Tensor) -> None:
        """Write what ``wire`` [size] stands for into ``values`` [numel]."""

    def _tail_of(self, wire: Tensor, offset: int) -> Tensor:
        return wire[offset : offset + COUNT_BYTES * self.tail].view(torch.float32)


class Residual:
    """Error feedback: what encoding lost is added to the next step's values (Karimireddy et al., 2019).

    A rank encodes each element of a message once a step, on its way up or, at the root, on its way down, so one
    residual of the message's length serves all topologies.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = torch.zeros_like(values)

    def encode(self, codec: Codec, values: Tensor, residual: Tensor, wire: Tensor) -> None:
        """Encode ``values`` plus what was lost before; ``values`` is overwritten by what ``wire`` stands for."""
        values[: codec.body] += residual[: codec.body]
        codec.encode(values, wire)
        residual.copy_(values)
        codec.decode(wire, values)
        # An overflow must reach the gradient scaler, but not stay in the memory of what was lost.
        torch.sub(residual, values, out=residual).nan_to_num_(0.0, 0.0, 0.0)
