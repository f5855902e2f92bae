"""What travels over a mesh: a kind, a JSON header that is checked where it arrives, and bytes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from annotated_types import Len
from pydantic import BaseModel, NonNegativeInt, ValidationError, create_model
from torch import Tensor

from lightning_autosync.documents import describe_validation_error
from lightning_autosync.errors import ExchangeError, MeshTimeout

LARGEST_HEADER = 1024 * 1024
"""Bytes of JSON that a message may have."""

MOST_BUFFERS = 256
"""Buffers that one system call may gather; the kernel takes 1024."""


class Mail(NamedTuple):
    """One message: its sender's rank, what it is, a few JSON values, and bytes that are the receiver's own."""

    sender: int
    kind: str
    header: dict[str, Any]
    payload: memoryview


class Sent:
    """A message being sent; its payload must not change until the receiver has confirmed it."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._error: ExchangeError | None = None
        self._moved_at = time.monotonic()
        self.cancelled = False

    @property
    def done(self) -> bool:
        """Whether the payload may change again."""
        return self._event.is_set()

    def wait(self, timeout: float) -> None:
        """Block until the receiver has the message, at most ``timeout`` seconds.

        Raises:
            PeerLost: the receiver is gone.
            MeshTimeout: it has not confirmed in time.
        """
        if not self._event.wait(timeout):
            raise MeshTimeout(f"a message was not confirmed in {timeout:g} s")
        if self._error is not None:
            raise self._error

    def wait_while_moving(self, stall: float) -> None:
        """Block until the receiver has the message, however long that takes as long as parts of it arrive.

        Raises:
            PeerLost: the receiver is gone.
            MeshTimeout: nothing of it was confirmed for ``stall`` seconds.
        """
        begin = time.monotonic()
        while not self._event.wait(max(0.0, max(begin, self._moved_at) + stall - time.monotonic())):
            if time.monotonic() >= max(begin, self._moved_at) + stall:
                raise MeshTimeout(f"nothing of a message was confirmed for {stall:g} s")
        if self._error is not None:
            raise self._error

    def move(self) -> None:
        """The receiver has confirmed a part of it."""
        self._moved_at = time.monotonic()

    def cancel(self) -> None:
        """Do not begin to send it; a message that has begun goes on."""
        self.cancelled = True

    def settle(self, error: ExchangeError | None = None) -> None:
        """Mark it as arrived, or with ``error`` as failed."""
        self._error = self._error or error
        self._event.set()


def as_bytes(payload: Sequence[memoryview | Tensor]) -> list[memoryview]:
    """The payload's parts as flat bytes, without copies; empty parts are left out."""
    parts = [_tensor_bytes(part) if isinstance(part, Tensor) else memoryview(part).cast("B") for part in payload]
    return [part for part in parts if part.nbytes]


def _tensor_bytes(tensor: Tensor) -> memoryview:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ExchangeError("only contiguous tensors in main memory can be sent")
    if not tensor.numel():
        return memoryview(b"")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def cut(parts: Sequence[memoryview], size: int) -> Iterator[tuple[memoryview, ...]]:
    """The parts' bytes in pieces of at most ``size`` bytes; small neighbours share a piece."""
    piece: list[memoryview] = []
    room = size
    for part in parts:
        while part.nbytes:
            head, part = part[:room], part[room:]
            piece.append(head)
            room -= head.nbytes
            if not room or len(piece) == MOST_BUFFERS:
                yield tuple(piece)
                piece, room = [], size
    if piece:
        yield tuple(piece)


def payload_size(payload: Sequence[memoryview]) -> int:
    """Bytes of all parts."""
    return sum(part.nbytes for part in payload)


class Message(NamedTuple):
    """What a stream is asked to send: the encoded kind and header, and the payload's parts."""

    head: bytes
    payload: list[memoryview]
    sent: Sent


def encode_head(kind: str, header: Mapping[str, Any]) -> bytes:
    """A message's kind and header as bytes.

    Raises:
        ExchangeError: the header is not JSON data, or too large.
    """
    try:
        head = json.dumps([kind, dict(header)], allow_nan=False).encode()
    except (TypeError, ValueError) as cause:
        raise ExchangeError(f"the header of a message of kind {kind!r} is not JSON data: {cause}") from None
    if len(head) > LARGEST_HEADER:
        raise ExchangeError(f"the header of a message of kind {kind!r} has {len(head)} bytes, over {LARGEST_HEADER}")
    return head


_PEER = {"peer": NonNegativeInt, "incarnation": NonNegativeInt}
_REQUEST = {
    "iteration": NonNegativeInt,
    "samples": NonNegativeInt,
    "elements": NonNegativeInt,
    "rate": (float, 0.0),
    "averages": (list[str] | None, None),
    "step_time": (float, 0.0),
    "exchange_time": (float, 0.0),
}
_GENERATION = {"generation": int}
_CHUNK = {**_GENERATION, "chunk": NonNegativeInt}

_FIELDS: dict[str, dict[str, Any]] = {
    "mesh.lost": {**_PEER, "why": str},
    "mesh.suspect": _PEER,
    "mesh.alive": _PEER,
    "controller.ready": _REQUEST,
    "controller.arrive": _REQUEST,
    "controller.complete": _GENERATION,
    "controller.broken": {**_GENERATION, "number": (int | None, None)},
    "worker.donate": {"takers": list[Annotated[list[int], Len(2, 2)]]},
    "worker.take": {"donor": NonNegativeInt, "visit": int, "drained": int},
    "worker.group": {
        **_GENERATION,
        "members": list[NonNegativeInt],
        "weights": list[float],
        "iteration": int,
        "rate": float,
        "atomic": bool,
        "drain": bool,
    },
    "worker.verdict": {**_GENERATION, "commit": bool},
    "worker.stop": {"reason": str},
    "worker.model": {"iteration": int, "facts": dict[str, Any], "visit": int, "optimizer": NonNegativeInt},
    "average.part": _CHUNK,
    "average.sum": _CHUNK,
    "average.abort": {**_GENERATION, "why": str},
    "work?": {"epoch": int, "length": NonNegativeInt, "count": NonNegativeInt},
    "work": {"epoch": int, "start": NonNegativeInt, "stop": NonNegativeInt},
    "trainer_state?": {"name": str, "drain": int},
    "trainer_state": {"name": str, "fault": str},
}
"""What the headers of each kind of message must have; a field with a default may be missing.

Servers check what workers send them by themselves, for it depends on the model.
"""

_MODELS: dict[str, type[BaseModel]] = {}
for _kind, _fields in _FIELDS.items():
    _given: dict[str, Any] = {name: of if isinstance(of, tuple) else (of, ...) for name, of in _fields.items()}
    _MODELS[_kind] = create_model("Header", **_given)


def header_fault(kind: str, header: dict[str, Any]) -> str:
    """What is wrong with a header; empty if nothing is, or if its kind is not checked here."""
    model = _MODELS.get(kind)
    if model is None:
        return ""
    try:
        model.model_validate(header, strict=True)
    except ValidationError as error:
        return describe_validation_error(error)
    return ""
