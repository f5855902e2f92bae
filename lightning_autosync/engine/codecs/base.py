"""The interface of codecs, which encode a range of elements with loss into a fixed number of bytes."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Protocol  # before Python 3.11, that of typing replaces `__init__`, which is checked

from lightning_autosync.plan.codecs import encoded_bytes
from lightning_autosync.plan.codecs.base import COUNT_BYTES
from lightning_autosync.plan.spec import Compressor


class Codec(Protocol):
    """Encodes ranges of elements of one length. `register` checks for this protocol; `BaseCodec` sets the attributes.

    Attributes:
        body: number of elements in a range, without counts.
        size: bytes of an encoded range.
    """

    body: int
    size: int

    def __init__(self, compressor: Compressor, numel: int, tail: int) -> None:
        """Make a codec for ``numel`` elements, of which the last ``tail`` are counts, encoded without loss."""

    def encode(self, values: Tensor, wire: Tensor) -> None:
        """Encode ``values`` [numel] into ``wire`` [size], uint8."""

    def decode(self, wire: Tensor, values: Tensor) -> None:
        """Decode ``wire`` [size], uint8, into ``values`` [numel]."""


class BaseCodec:
    """Base of codecs with the sizes that the compressor's format declares."""

    def __init__(self, compressor: Compressor, numel: int, tail: int) -> None:
        self.body = numel - tail
        self.tail = tail
        self.size = encoded_bytes(compressor, numel, tail, itemsize=4)

    def _tail_of(self, wire: Tensor, offset: int) -> Tensor:
        return wire[offset : offset + COUNT_BYTES * self.tail].view(torch.float32)


def encode_with_feedback(codec: Codec, values: Tensor, residual: Tensor, wire: Tensor) -> None:
    """Encode with error feedback: the loss of encoding is added to the next step's values (Karimireddy et al., 2019).

    A rank encodes each element of a message once per step (on the way up or, at the root, on the way down), so one
    residual of the message's length serves all topologies.

    Args:
        codec: a codec for ranges of this length.
        values: [numel]; overwritten with the decoded ``wire``.
        residual: [numel], loss of the last step in this range; overwritten with the loss of this step.
        wire: [size], uint8; overwritten with the encoded values.
    """
    values[: codec.body] += residual[: codec.body]
    codec.encode(values, wire)
    residual.copy_(values)
    codec.decode(wire, values)
    # An overflow must reach the gradient scaler through the wire, but must not stay in the residual.
    torch.sub(residual, values, out=residual).nan_to_num_(0.0, 0.0, 0.0)
