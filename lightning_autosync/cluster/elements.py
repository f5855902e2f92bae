"""The elements of a cluster: nodes, and links between nodes and switches."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_serializer, model_validator
from pydantic.functional_serializers import SerializerFunctionWrapHandler

from lightning_autosync.cluster.units import Bytes, Rate, Seconds
from lightning_autosync.documents import Count, Record

Name = Annotated[str, Field(pattern=r"^\S+$")]
MOST_NODES = 4096
"""Of a cluster."""
MOST_RANKS = 16384
"""Of a cluster: devices of all nodes."""
Address = Annotated[str, Field(pattern=r"^[^\s-]\S*$")]
"""A host name or an IP address. Commands take it as a word, which must not be read as an option of theirs."""


class Node(Record):
    """A machine.

    Attributes:
        address: host name or IP address to reach it at, where it is known.
        devices: how many ranks it runs.
        speed: how fast one of its devices computes, relative to the other nodes' devices.
        memory: bytes of one device, where it is known.
    """

    name: Name
    address: Address | None = None
    devices: Annotated[Count, Field(le=MOST_RANKS)] = 1
    speed: float = Field(default=1.0, ge=1e-6, le=1e6)
    memory: Bytes | None = None


class Link(Record):
    """A full-duplex link between two nodes or switches.

    Attributes:
        a, b: its ends, each the name of a node or a switch.
        bandwidth: bytes/s from a to b; None where it is unknown.
        reverse_bandwidth: bytes/s from b to a; as ``bandwidth`` if left out.
        latency: seconds that a byte takes, either way.
    """

    a: str
    b: str
    bandwidth: Rate | None = None
    reverse_bandwidth: Rate | None = None
    latency: Seconds = 0.0

    @model_validator(mode="before")
    @classmethod
    def _fill_reverse(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("reverse_bandwidth") is None:
            return {**data, "reverse_bandwidth": data.get("bandwidth")}
        return data

    @model_validator(mode="after")
    def _check(self) -> Link:
        if self.a == self.b:
            raise ValueError(f"b: a link needs two different ends, both are '{self.a}'")
        if self.bandwidth is None and self.reverse_bandwidth is not None:
            raise ValueError("bandwidth: missing although reverse_bandwidth is given")
        return self

    @model_serializer(mode="wrap")
    def _leave_out_equal_reverse(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = serialize(self)
        if self.reverse_bandwidth == self.bandwidth:
            data.pop("reverse_bandwidth", None)
        return data
