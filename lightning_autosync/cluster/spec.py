"""`ClusterSpec`: nodes, switches and the links between them, as a document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar

import numpy
from pydantic import Field, model_serializer, model_validator
from pydantic_core.core_schema import SerializerFunctionWrapHandler
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from lightning_autosync.cluster.shapes import MOST_NODES, MOST_RANKS, SHAPES, expand_short_form
from lightning_autosync.cluster.units import Bytes, Rate, Seconds
from lightning_autosync.documents import Count, Document, Record
from lightning_autosync.errors import ClusterError

Name = Annotated[str, Field(pattern=r"^\S+$")]
Address = Annotated[str, Field(pattern=r"^[^\s-]\S*$")]
"""A host name or an IP address; it must not start with a hyphen, because commands would read it as an option."""


HIDDEN_LATENCY = 1e-3
"""Largest latency in seconds that emulated links leave out, because the noise of the machine hides it."""


class Node(Record):
    """A machine.

    Attributes:
        name: name, unique among nodes and switches.
        address: host name or IP address, if known.
        devices: number of devices, each of which runs one rank.
        speed: compute speed of one device relative to the other nodes' devices.
        memory: bytes of one device, if known.
    """

    name: Name
    address: Address | None = None
    devices: Annotated[Count, Field(le=MOST_RANKS)] = 1
    speed: float = Field(default=1.0, ge=1e-6, le=1e6)
    memory: Bytes | None = None


class Link(Record):
    """A full-duplex link between two nodes or switches.

    Attributes:
        a, b: names of its ends, each a node or a switch.
        bandwidth: bytes/s from a to b; None if unknown.
        reverse_bandwidth: bytes/s from b to a; by default as ``bandwidth``.
        latency: seconds, in each direction.
    """

    a: str
    b: str
    bandwidth: Rate | None = None
    reverse_bandwidth: Rate | None = None
    latency: Seconds = 0.0

    @property
    def emulated_latency(self) -> float:
        """Seconds by which an emulated link delays packets in each direction."""
        return self.latency if self.latency > HIDDEN_LATENCY else 0.0

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


def check_names(nodes: Sequence[Node], switches: Sequence[str]) -> None:
    """Raise ``ValueError`` if a name is given twice."""
    seen: set[str] = set()
    fields = [(f"nodes[{index}].name", node.name) for index, node in enumerate(nodes)]
    fields += [(f"switches[{index}]", name) for index, name in enumerate(switches)]
    for field, name in fields:
        if name in seen:
            raise ValueError(f"{field}: '{name}' is taken; nodes and switches need different names")
        seen.add(name)


def check_size(nodes: Sequence[Node]) -> None:
    """Raise ``ValueError`` if there are more than `MOST_RANKS` ranks."""
    if (ranks := sum(node.devices for node in nodes)) > MOST_RANKS:
        raise ValueError(f"nodes: {ranks} devices in all; allowed: {MOST_RANKS} at most")


def check_links(nodes: Sequence[Node], switches: Sequence[str], links: Sequence[Link]) -> None:
    """Raise ``ValueError`` if a link has an unknown end or occurs twice, or if only some links have a rate."""
    known = {node.name for node in nodes} | set(switches)
    seen: set[frozenset[str]] = set()
    for index, link in enumerate(links):
        for field, name in (("a", link.a), ("b", link.b)):
            if name not in known:
                raise ValueError(f"links[{index}].{field}: '{name}' is neither a node nor a switch")
        ends = frozenset((link.a, link.b))
        if ends in seen:
            raise ValueError(
                f"links[{index}]: '{link.a}' and '{link.b}' are linked already; give one link of their summed bandwidth"
            )
        seen.add(ends)
    unknown = [index for index, link in enumerate(links) if link.bandwidth is None]
    if unknown and len(unknown) < len(links):
        raise ValueError(
            f"links[{unknown[0]}].bandwidth: missing although other links have one; state it on all links or on none"
        )


def check_connected(nodes: Sequence[Node], switches: Sequence[str], links: Sequence[Link]) -> None:
    """Raise ``ValueError`` if a node or a switch cannot be reached from the first node."""
    names = [*(node.name for node in nodes), *switches]
    places = {name: place for place, name in enumerate(names)}
    ends = numpy.array([(places[link.a], places[link.b]) for link in links], dtype=numpy.int32).reshape(-1, 2)
    graph = coo_array((numpy.ones(len(ends)), ends.T), shape=(len(names), len(names)))
    _, parts = connected_components(graph, directed=False)
    stranded = [name for name, part in zip(names, parts, strict=True) if part != parts[0]]
    if stranded:
        raise ValueError(f"links: no path from '{names[0]}' to {', '.join(map(repr, stranded))}")


def check_rank_order(nodes: Sequence[Node], rank_order: Sequence[str] | None) -> None:
    """Raise ``ValueError`` if an order is given that does not contain each node once per device."""
    if rank_order is None:
        return
    devices = {node.name: node.devices for node in nodes}
    for index, name in enumerate(rank_order):
        if name not in devices:
            raise ValueError(f"rank_order[{index}]: '{name}' is not a node; allowed: {', '.join(devices)}")
    occurrences = Counter(rank_order)
    for name, count in devices.items():
        if occurrences[name] != count:
            raise ValueError(
                f"rank_order: '{name}' occurs {occurrences[name]} times, expected {count}, once per device; "
                f"the order has {len(rank_order)} entries for {sum(devices.values())} ranks"
            )


LOCAL_BANDWIDTH = 10 * 2.0**30
"""Default bytes/s between devices of one node; about the memory bandwidth of one core."""


class ClusterSpec(Document):
    """The machines of a job, the links between them, and the node of each rank.

    Either all links have known rates or none has. Without rates only the shape is known: ``measured`` is False, and no
    times can be computed. Instead of ``nodes``, ``switches`` and ``links`` a file may have one short form: ``uniform``,
    ``star`` or ``racks`` (see :mod:`lightning_autosync.cluster.shapes`).

    Attributes:
        name: name of the cluster.
        nodes: the machines.
        switches: names of the switches.
        links: the links, at most one between two ends; parallel cables count as one link with their summed rate.
        local_bandwidth: bytes/s of each device to and from the others of its node. The only device of a node uses the
            node's links directly.
        local_latency: seconds between a device and its node; two devices of a node are twice that apart.
        rank_order: [ranks] name of each rank's node; each node occurs once per device. By default ranks follow the
            order of the nodes.
    """

    FORMAT: ClassVar[str] = "autosync-cluster/1"
    ERROR: ClassVar[type[ClusterError]] = ClusterError
    SHORT_FORMS: ClassVar[tuple[str, ...]] = tuple(SHAPES)

    name: str = Field(min_length=1)
    nodes: tuple[Node, ...] = Field(min_length=1, max_length=MOST_NODES)
    switches: tuple[Name, ...] = ()
    links: tuple[Link, ...] = ()
    local_bandwidth: Rate = LOCAL_BANDWIDTH
    local_latency: Seconds = 0.0
    rank_order: tuple[str, ...] | None = None

    @classmethod
    def uniform(
        cls,
        nodes: int,
        devices: int = 1,
        bandwidth: float | str | None = None,
        latency: float | str = 0.0,
        name: str = "uniform",
    ) -> ClusterSpec:
        """Equal nodes on one switch; without ``bandwidth`` only the shape is known."""
        shape = {"nodes": nodes, "devices": devices, "bandwidth": bandwidth, "latency": latency}
        return cls._from_shape(name, "uniform", shape)

    @classmethod
    def star(
        cls,
        bandwidths: Sequence[float | str],
        devices: int = 1,
        latency: float | str = 0.0,
        name: str = "star",
    ) -> ClusterSpec:
        """One switch, and one node for each of ``bandwidths``."""
        shape = {"bandwidths": list(bandwidths), "devices": devices, "latency": latency}
        return cls._from_shape(name, "star", shape)

    @classmethod
    def racks(
        cls,
        racks: int,
        nodes_per_rack: int,
        bandwidth: float | str | None = None,
        uplink: float | str | None = None,
        devices: int = 1,
        latency: float | str = 0.0,
        name: str = "racks",
    ) -> ClusterSpec:
        """Racks of equal nodes, each rack with a switch and an ``uplink`` from it to a core switch."""
        shape = {"racks": racks, "nodes_per_rack": nodes_per_rack, "bandwidth": bandwidth, "uplink": uplink}
        return cls._from_shape(name, "racks", {**shape, "devices": devices, "latency": latency})

    @classmethod
    def _from_shape(cls, name: str, shape: str, fields: dict[str, Any]) -> ClusterSpec:
        return cls.from_dict({"format": cls.FORMAT, "name": name, shape: fields})

    @cached_property
    def world_size(self) -> int:
        """Number of ranks, which are the devices of all nodes."""
        return sum(node.devices for node in self.nodes)

    @cached_property
    def rank_nodes(self) -> tuple[int, ...]:
        """[ranks] index of each rank's node in ``nodes``."""
        if self.rank_order is None:
            return tuple(index for index, node in enumerate(self.nodes) for _ in range(node.devices))
        index_of = {node.name: index for index, node in enumerate(self.nodes)}
        return tuple(index_of[name] for name in self.rank_order)

    def ranks_of(self, node_index: int) -> tuple[int, ...]:
        """The ranks that run on ``nodes[node_index]``, ascending."""
        return self._ranks_by_node[node_index]

    @cached_property
    def _ranks_by_node(self) -> tuple[tuple[int, ...], ...]:
        ranks: list[list[int]] = [[] for _ in self.nodes]
        for rank, index in enumerate(self.rank_nodes):
            ranks[index].append(rank)
        return tuple(map(tuple, ranks))

    @property
    def measured(self) -> bool:
        """Whether the rates of the links are known."""
        return all(link.bandwidth is not None for link in self.links)

    def require_measured(self) -> None:
        """Raise ``ClusterError`` unless the rates of the links are known."""
        if not self.measured:
            raise ClusterError(
                f"cluster '{self.name}': links[0].bandwidth: unknown, as for every link; "
                "state bandwidths, or measure them with `autosync probe`"
            )

    def localities(self) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks that are close to each other, each ascending, sorted by first rank.

        A group is a node if any node has several devices; otherwise it is the nodes on one switch (a rack). If this
        gives only one group, or only groups of one rank, all ranks are one group.
        """
        return next(iter(self.hierarchy()), (tuple(range(self.world_size)),))

    def hierarchy(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Groupings of the ranks as in :meth:`localities`, from near to far: by node, then by switch.

        Groupings with only one group, or only groups of one rank, are left out.
        """
        names = [self.nodes[index].name for index in self.rank_nodes]
        switch_of = self._first_switches()
        groupings = (_group(names), _group([switch_of.get(name, name) for name in names]))
        return tuple(groups for groups in groupings if 1 < len(groups) < self.world_size)

    def _first_switches(self) -> dict[str, str]:
        """The first switch to which each node is linked, by node; nodes without a switch are left out."""
        switches, found = set(self.switches), dict[str, str]()
        for link in self.links:
            for end, other in ((link.a, link.b), (link.b, link.a)):
                if other in switches:
                    found.setdefault(end, other)
        return found

    def with_rank_order(self, rank_order: Sequence[str] | None) -> ClusterSpec:
        """The same machines with another placement of ranks (the name of each rank's node)."""
        return self._replace(rank_order=None if rank_order is None else list(rank_order))

    def scaled(self, factor: float) -> ClusterSpec:
        """The same cluster with all rates, local ones included, multiplied by ``factor``; latencies stay."""
        links = [
            {
                **link.model_dump(),
                "bandwidth": _times(link.bandwidth, factor),
                "reverse_bandwidth": _times(link.reverse_bandwidth, factor),
            }
            for link in self.links
        ]
        return self._replace(links=links, local_bandwidth=self.local_bandwidth * factor)

    def as_emulated(self) -> ClusterSpec:
        """The same cluster as emulated on one machine.

        Emulated links have rates, but no latencies up to `HIDDEN_LATENCY`. Devices of a node communicate at the speed
        of that machine, independent of the rates of the links.
        """
        links = [{**link.model_dump(), "latency": link.emulated_latency} for link in self.links]
        return self._replace(links=links, local_latency=0.0, local_bandwidth=LOCAL_BANDWIDTH)

    def _replace(self, **fields: Any) -> ClusterSpec:
        return self.from_dict({**self.to_dict(), **fields}, source=f"cluster '{self.name}'")

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON schema of the file form: with nodes, or with one short form."""
        schema = super().json_schema()
        schema["properties"] |= {name: shape.model_json_schema() for name, shape in SHAPES.items()}
        schema["required"] = [field for field in schema["required"] if field != "nodes"]
        schema["oneOf"] = [{"required": [field]} for field in ("nodes", *SHAPES)]
        return schema

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, data: Any) -> Any:
        return expand_short_form(data) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _check(self) -> ClusterSpec:
        check_size(self.nodes)
        check_names(self.nodes, self.switches)
        check_links(self.nodes, self.switches, self.links)
        check_connected(self.nodes, self.switches, self.links)
        check_rank_order(self.nodes, self.rank_order)
        return self


def _times(rate: float | None, factor: float) -> float | None:
    return None if rate is None else rate * factor


def _group(places: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Groups of ranks with the same place, sorted by first rank."""
    groups: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        groups.setdefault(place, []).append(rank)
    return tuple(tuple(group) for group in groups.values())
