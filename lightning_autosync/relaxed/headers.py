"""What the headers of messages must have, by kind; checked where they arrive, so that whoever reads them need not."""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import Len
from pydantic import NonNegativeInt, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from lightning_autosync.documents import describe_validation_error


class _Peer(TypedDict):
    peer: NonNegativeInt
    incarnation: NonNegativeInt


class _Lost(_Peer):
    why: str


class _Note(TypedDict):
    iteration: NonNegativeInt
    samples: NonNegativeInt
    elements: NonNegativeInt
    rate: NotRequired[float]
    averages: NotRequired[list[str] | None]
    step_time: NotRequired[float]
    exchange_time: NotRequired[float]


class _Generation(TypedDict):
    generation: int


class _Broken(_Generation):
    number: NotRequired[int | None]


class _Donate(TypedDict):
    takers: list[Annotated[list[int], Len(2, 2)]]


class _Take(TypedDict):
    donor: NonNegativeInt
    visit: int
    drained: int


class _Group(_Generation):
    members: list[NonNegativeInt]
    weights: list[float]
    iteration: int
    rate: float
    atomic: bool
    drain: bool


class _Verdict(_Generation):
    commit: bool


class _Stop(TypedDict):
    reason: str


class _Model(TypedDict):
    iteration: int
    facts: dict[str, Any]
    visit: int
    optimizer: NonNegativeInt


class _Chunk(_Generation):
    chunk: NonNegativeInt


class _Abort(_Generation):
    why: str


class _WorkAsked(TypedDict):
    epoch: int
    length: NonNegativeInt
    count: NonNegativeInt


class _Work(TypedDict):
    epoch: int
    start: NonNegativeInt
    stop: NonNegativeInt


class _PositionAsked(TypedDict):
    name: str
    meeting: int


class _Position(TypedDict):
    name: str
    fault: str


_SHAPES: dict[str, TypeAdapter[Any]] = {
    kind: TypeAdapter(shape)
    for kind, shape in {
        "mesh.lost": _Lost,
        "mesh.doubt": _Peer,
        "mesh.heard": _Peer,
        "controller.ready": _Note,
        "controller.arrive": _Note,
        "controller.complete": _Generation,
        "controller.broken": _Broken,
        "worker.donate": _Donate,
        "worker.take": _Take,
        "worker.group": _Group,
        "worker.verdict": _Verdict,
        "worker.stop": _Stop,
        "worker.model": _Model,
        "average.part": _Chunk,
        "average.sum": _Chunk,
        "average.abort": _Abort,
        "work?": _WorkAsked,
        "work": _Work,
        "position?": _PositionAsked,
        "position": _Position,
    }.items()
}
"""Servers judge what workers send them by themselves, for it depends on the model."""


def header_fault(kind: str, header: dict[str, Any]) -> str:
    """What is wrong with a header as JSON had it; empty if nothing is, or nothing is asked of its kind."""
    shape = _SHAPES.get(kind)
    if shape is None:
        return ""
    try:
        shape.validate_python(header, strict=True)
    except ValidationError as error:
        return describe_validation_error(error)
    return ""
