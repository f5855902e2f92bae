"""What a codec is: a lossy, fixed-size form of a run of elements."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lightning_autosync.plan.codecs import encoded_bytes
from lightning_autosync.plan.codecs.base import COUNT_BYTES
from lightning_autosync.plan.spec import Compressor


class Codec(Protocol):
    """Encodes runs of elements of one length; what `register` checks. `BaseCodec` has the attributes.

    Attributes:
        body: elements, without counts.
        size: bytes of an encoded run.
    """

    body: int
    size: int

    def __init__(self, compressor: Compressor, numel: int, tail: int) -> None:
        """Of ``numel`` elements, the last ``tail`` are counts, which travel exact."""

    def encode(self, values: Tensor, wire: Tensor) -> None:
        """Write the form of ``values`` [numel] into ``wire`` [size], uint8."""

    def decode(self, wire: Tensor, values: Tensor) -> None:
        """Write what ``wire`` [size] stands for into ``values`` [numel]."""


class BaseCodec:
    """Sizes of a codec, as the declared half of the compressor's kind gives them."""

    def __init__(self, compressor: Compressor, numel: int, tail: int) -> None:
        self.body = numel - tail
        self.tail = tail
        self.size = encoded_bytes(compressor, numel, tail, itemsize=4)

    def _tail_of(self, wire: Tensor, offset: int) -> Tensor:
        return wire[offset : offset + COUNT_BYTES * self.tail].view(torch.float32)


def encode_with_feedback(codec: Codec, values: Tensor, residual: Tensor, wire: Tensor) -> None:
    """Encode with error feedback: what encoding lost is added to the next step's values (Karimireddy et al., 2019).

    A rank encodes each element of a message once a step, on its way up or, at the root, on its way down, so one
    residual of the message's length serves all topologies.

    Args:
        codec: for runs of this length.
        values: [numel]; overwritten by what ``wire`` stands for.
        residual: [numel], of this run; what was lost in the last step, and then in this one.
        wire: [size], uint8; written to.
    """
    values[: codec.body] += residual[: codec.body]
    codec.encode(values, wire)
    residual.copy_(values)
    codec.decode(wire, values)
    # An overflow must reach the gradient scaler, but must not stay in the residual.
    torch.sub(residual, values, out=residual).nan_to_num_(0.0, 0.0, 0.0)
