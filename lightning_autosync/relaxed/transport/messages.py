"""Messages of a mesh: a kind, a JSON header that the receiver checks, and a payload of bytes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from annotated_types import Len
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError, create_model
from torch import Tensor

from lightning_autosync.documents import describe_validation_error
from lightning_autosync.errors import ExchangeError, MeshTimeout

LARGEST_HEADER = 1024 * 1024
"""Largest size of a message's JSON in bytes."""

MOST_BUFFERS = 256
"""Largest number of buffers per system call; the kernel's limit is 1024."""


class Mail(NamedTuple):
    """A received message: the sender's rank, the kind, JSON values, and a payload that the receiver owns."""

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
        """Block until the receiver has confirmed the message, for at most ``timeout`` seconds.

        Raises:
            PeerLost: the receiver is gone.
            MeshTimeout: the receiver has not confirmed in time.
        """
        if not self._event.wait(timeout):
            raise MeshTimeout(f"a message was not confirmed within {timeout:g} s")
        if self._error is not None:
            raise self._error

    def wait_while_moving(self, stall: float) -> None:
        """Block until the receiver has confirmed the message; there is no time limit while parts of it are confirmed.

        Raises:
            PeerLost: the receiver is gone.
            MeshTimeout: no part was confirmed for ``stall`` seconds.
        """
        begin = time.monotonic()
        while not self._event.wait(max(0.0, max(begin, self._moved_at) + stall - time.monotonic())):
            if time.monotonic() >= max(begin, self._moved_at) + stall:
                raise MeshTimeout(f"no part of a message was confirmed for {stall:g} s")
        if self._error is not None:
            raise self._error

    def move(self) -> None:
        """Note that the receiver has confirmed a part of the message."""
        self._moved_at = time.monotonic()

    def cancel(self) -> None:
        """Do not begin to send the message; if it has begun, it is sent completely."""
        self.cancelled = True

    def settle(self, error: ExchangeError | None = None) -> None:
        """Mark the message as arrived, or with ``error`` as failed."""
        self._error = self._error or error
        self._event.set()


def as_bytes(payload: Sequence[memoryview | Tensor]) -> list[memoryview]:
    """The parts of a payload as flat bytes, without copies; empty parts are left out."""
    parts = [_tensor_bytes(part) if isinstance(part, Tensor) else memoryview(part).cast("B") for part in payload]
    return [part for part in parts if part.nbytes]


def _tensor_bytes(tensor: Tensor) -> memoryview:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ExchangeError("only contiguous tensors in main memory can be sent")
    if not tensor.numel():
        return memoryview(b"")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def cut(parts: Sequence[memoryview], size: int) -> Iterator[tuple[memoryview, ...]]:
    """Cut the parts into pieces of at most ``size`` bytes; small neighbouring parts share a piece."""
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
    """Total number of bytes of all parts."""
    return sum(part.nbytes for part in payload)


class OutgoingMessage(NamedTuple):
    """A message to send: the encoded kind and header, the parts of the payload, and the state of sending."""

    head: bytes
    payload: list[memoryview]
    sent: Sent


def encode_head(kind: str, header: Mapping[str, Any]) -> bytes:
    """Encode the kind and header of a message.

    Raises:
        ExchangeError: the header is not JSON data, or too large.
    """
    try:
        head = json.dumps([kind, dict(header)], allow_nan=False).encode()
    except (TypeError, ValueError) as cause:
        raise ExchangeError(f"the header of a message of kind {kind!r} is not JSON data: {cause}") from None
    if len(head) > LARGEST_HEADER:
        raise ExchangeError(
            f"the header of a message of kind {kind!r} has {len(head)} bytes; allowed: at most {LARGEST_HEADER}"
        )
    return head


_PEER = {"peer": NonNegativeInt, "incarnation": NonNegativeInt}
_REQUEST = {
    "iteration": NonNegativeInt,
    "samples": NonNegativeInt,
    "elements": NonNegativeInt,
    "due": (list[NonNegativeInt], ()),
    "rates": (list[float], ()),
    "averages": (list[str] | None, None),
    "frozen": (list[int], ()),
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
        "rates": list[float],
        "atomic": bool,
        "drain": bool,
        "number": (int | None, None),
        "bridging": (bool, False),
        "active": (NonNegativeInt, 0),
        "whole": (bool, True),
        "averages": (list[str], ()),
        "visits": (list[int], ()),
        "unlike": (list[NonNegativeInt], ()),
        "period": (int, 1),
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
"""Types of the header's fields, by kind of message; fields with a default may be missing, others are refused.

Servers check messages of workers themselves, because these depend on the model.
"""

_MODELS: dict[str, type[BaseModel]] = {}
for _kind, _fields in _FIELDS.items():
    _given: dict[str, Any] = {name: of if isinstance(of, tuple) else (of, ...) for name, of in _fields.items()}
    _MODELS[_kind] = create_model("Header", __config__=ConfigDict(extra="forbid"), **_given)


def header_fault(kind: str, header: dict[str, Any]) -> str:
    """A description of the fault in a header; empty if there is none, or if the kind is not checked here."""
    model = _MODELS.get(kind)
    if model is None:
        return ""
    try:
        # Strict, because a peer's strings or floats must not pass as integers.
        model.model_validate(header, strict=True)
    except ValidationError as error:
        return describe_validation_error(error)
    return ""
