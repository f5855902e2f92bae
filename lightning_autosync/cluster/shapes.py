"""Short forms of regular clusters, expanded into nodes, switches and links.

A cluster file may contain one shape instead of its nodes::

    uniform: {nodes: 4, devices: 1, bandwidth: 1 Gbit/s, latency: 50 us}
    star: {bandwidths: [400 Mbit/s, 100 Mbit/s, 100 Mbit/s], latency: 50 us}
    racks: {racks: 2, nodes_per_rack: 4, bandwidth: 400 Mbit/s, uplink: 200 Mbit/s}
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from lightning_autosync.cluster.units import Rate, Seconds
from lightning_autosync.documents import Count, Record, describe_validation_error

MOST_NODES = 4096
"""Largest number of nodes of a cluster."""
MOST_RANKS = 16384
"""Largest number of ranks of a cluster, which are the devices of all nodes."""


class Shape(Record):
    """A regular cluster in few numbers.

    Attributes:
        devices: number of devices per node.
        latency: seconds, of one link.
    """

    devices: Annotated[Count, Field(le=MOST_RANKS)] = 1
    latency: Seconds = 0.0

    @abstractmethod
    def expand(self) -> dict[str, Any]:
        """The fields ``nodes``, ``switches`` and ``links`` of the cluster, as plain data."""

    def _nodes(self, count: int) -> list[dict[str, Any]]:
        return [{"name": f"node{index}", "devices": self.devices} for index in range(count)]

    def _link(self, a: str, b: str, bandwidth: float | None) -> dict[str, Any]:
        return {"a": a, "b": b, "bandwidth": bandwidth, "latency": self.latency}


class UniformShape(Shape):
    """Equal nodes on one switch; without ``bandwidth`` only the shape is known."""

    nodes: Annotated[Count, Field(le=MOST_NODES)]
    bandwidth: Rate | None = None

    def expand(self) -> dict[str, Any]:
        return _one_switch(self, [self.bandwidth] * self.nodes)


class StarShape(Shape):
    """One switch, and one node for each of ``bandwidths`` (bytes/s of its link in each direction)."""

    bandwidths: tuple[Rate, ...] = Field(min_length=1, max_length=MOST_NODES)

    def expand(self) -> dict[str, Any]:
        return _one_switch(self, list(self.bandwidths))


class RacksShape(Shape):
    """Racks of equal nodes; each rack has a switch with an uplink to a core switch."""

    racks: Annotated[Count, Field(le=MOST_NODES)]
    nodes_per_rack: Annotated[Count, Field(le=MOST_NODES)]
    bandwidth: Rate | None = None
    uplink: Rate | None = None

    @model_validator(mode="after")
    def _check_rates(self) -> RacksShape:
        if (self.bandwidth is None) != (self.uplink is None):
            raise ValueError("bandwidth and uplink: state both or neither")
        if self.racks * self.nodes_per_rack > MOST_NODES:
            raise ValueError(f"racks x nodes_per_rack: {self.racks * self.nodes_per_rack}; allowed: {MOST_NODES} nodes")
        return self

    def expand(self) -> dict[str, Any]:
        nodes = self._nodes(self.racks * self.nodes_per_rack)
        switches = [f"rack{index}" for index in range(self.racks)]
        links = [
            self._link(node["name"], switches[index // self.nodes_per_rack], self.bandwidth)
            for index, node in enumerate(nodes)
        ]
        if self.racks > 1:
            links += [self._link(switch, "core", self.uplink) for switch in switches]
            switches.append("core")
        return {"nodes": nodes, "switches": switches, "links": links}


SHAPES: dict[str, type[Shape]] = {"uniform": UniformShape, "star": StarShape, "racks": RacksShape}


def expand_short_form(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a cluster with its short form, if any, expanded.

    Raises:
        ValueError: there are two short forms, or one together with ``nodes``, or a field of it is wrong.
    """
    used = [name for name in SHAPES if name in fields]
    if not used:
        return fields
    clashing = [*used, *(name for name in ("nodes", "switches", "links") if name in fields)]
    if len(clashing) > 1:
        raise ValueError(f"{' and '.join(clashing)}: give one short form, or nodes and links, not both")
    name = used[0]
    rest = {key: value for key, value in fields.items() if key != name}
    return {**rest, **_read_shape(name, fields[name]).expand()}


def _read_shape(name: str, data: Any) -> Shape:
    if not isinstance(data, dict):
        raise ValueError(f"{name}: expected a mapping of fields, got {type(data).__name__}")
    try:
        return SHAPES[name].model_validate(data)
    except ValidationError as error:
        problem = describe_validation_error(error, kind=SHAPES[name])
    raise ValueError(f"{name}.{problem}")


def _one_switch(shape: Shape, bandwidths: list[float | None]) -> dict[str, Any]:
    nodes = shape._nodes(len(bandwidths))
    if len(nodes) == 1:
        return {"nodes": nodes}
    links = [shape._link(node["name"], "switch", bandwidth) for node, bandwidth in zip(nodes, bandwidths, strict=True)]
    return {"nodes": nodes, "switches": ["switch"], "links": links}
