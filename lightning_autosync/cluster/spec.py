"""`ClusterSpec`: nodes, switches and the links between them, as a document."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_serializer, model_validator
from pydantic_core.core_schema import SerializerFunctionWrapHandler

from lightning_autosync.cluster.checks import (
    check_connected,
    check_interfaces,
    check_links,
    check_names,
    check_paths,
    check_rank_order,
    check_size,
    stranded,
)
from lightning_autosync.cluster.shapes import MOST_NODES, MOST_RANKS, SHAPES, expand_short_form
from lightning_autosync.cluster.units import Bytes, Rate, Seconds, warn_of_bare_numbers
from lightning_autosync.documents import Count, Document, Record
from lightning_autosync.errors import ClusterError

Name = Annotated[str, Field(pattern=r"^\S+$")]
Address = Annotated[str, Field(pattern=r"^[^\s-]\S*$")]
"""A host name or an IP address; it must not start with a hyphen, because commands would read it as an option."""


HIDDEN_LATENCY = 1e-3
"""Largest latency in seconds that emulated links leave out, because the noise of the machine hides it."""


class Interface(Record):
    """A network interface of a node.

    Attributes:
        name: name, unique in the node.
        address: host name or IP address, if known.
        links: names of the nodes and switches to which it has a link.
    """

    name: Name
    address: Address | None = None
    links: Annotated[tuple[str, ...], Field(min_length=1)]


class Node(Record):
    """A machine.

    Attributes:
        name: name, unique among nodes and switches.
        address: host name or IP address, if known; with ``interfaces``, by default that of the first one.
        interfaces: network interfaces; together they have all links of the node. A node with none listed has one.
        devices: number of devices, each of which runs one rank.
        speed: compute speed of one device relative to the other nodes' devices.
        memory: bytes of one device, if known.
    """

    name: Name
    address: Address | None = None
    interfaces: tuple[Interface, ...] = ()
    devices: Annotated[Count, Field(le=MOST_RANKS)] = 1
    speed: float = Field(default=1.0, ge=1e-6, le=1e6)
    memory: Bytes | None = None

    @model_validator(mode="after")
    def _share_address(self) -> Node:
        first = self.interfaces[0].address if self.interfaces else self.address
        if self.address is None:
            object.__setattr__(self, "address", first)
        elif first != self.address:
            raise ValueError(
                f"interfaces[0].address: {first or 'missing'}, but the node's address is {self.address}; both must be "
                "the same"
            )
        return self

    @property
    def interface_count(self) -> int:
        """Number of interfaces, at least 1."""
        return max(1, len(self.interfaces))


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
    def directions(self) -> tuple[tuple[str, str, float], ...]:
        """Source, target and bytes/s of both directions; empty if the rates are unknown."""
        if self.bandwidth is None or self.reverse_bandwidth is None:
            return ()
        return (self.a, self.b, self.bandwidth), (self.b, self.a, self.reverse_bandwidth)

    @property
    def emulated_latency(self) -> float:
        """Seconds by which an emulated link delays packets in each direction."""
        return self.latency if self.latency > HIDDEN_LATENCY else 0.0

    @model_validator(mode="after")
    def _check(self) -> Link:
        if self.a == self.b:
            raise ValueError(f"b: a link needs two different ends, both are '{self.a}'")
        if self.bandwidth is None and self.reverse_bandwidth is not None:
            raise ValueError("bandwidth: missing although reverse_bandwidth is given")
        if self.reverse_bandwidth is None:  # filled in here, so that a wrong bandwidth is one mistake and not two
            object.__setattr__(self, "reverse_bandwidth", self.bandwidth)
        return self

    @model_serializer(mode="wrap")
    def _leave_out_equal_reverse(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = serialize(self)
        if self.reverse_bandwidth == self.bandwidth:
            data.pop("reverse_bandwidth", None)
        return data


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
        # A text is no list of characters; what else is no list is refused below.
        rates = list(bandwidths) if isinstance(bandwidths, Iterable) and not isinstance(bandwidths, str) else bandwidths
        shape = {"bandwidths": rates, "devices": devices, "latency": latency}
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
        found = cls.from_dict({"format": cls.FORMAT, "name": name, shape: fields})
        warn_of_bare_numbers({shape: fields}, cls.__name__)
        return found

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

    @cached_property
    def interface_count(self) -> int:
        """Number of interfaces that each node has at least; connections may run over any of these."""
        return min(node.interface_count for node in self.nodes)

    def carries(self, interface: int, link: Link) -> bool:
        """Whether connections over an interface (its index) may use a link, at either end of which may be a node."""
        return self._leads(link.a, link.b, interface) and self._leads(link.b, link.a, interface)

    def over(self, interface: int) -> ClusterSpec:
        """The same nodes with only the links over which connections over an interface (its index) may run."""
        links = [link for link in self.links if self.carries(interface, link)]
        lost = stranded(self.nodes, self.switches, links)
        return self.model_copy(
            update={
                "nodes": tuple(node.model_copy(update={"interfaces": ()}) for node in self.nodes),
                "switches": tuple(name for name in self.switches if name not in lost),
                "links": tuple(link for link in links if link.a not in lost),
            }
        )

    def _leads(self, end: str, other: str, interface: int) -> bool:
        """Whether a node's interface has its link to another end; other interfaces are not used to forward data."""
        listed = self._listed_interfaces.get(end)
        return listed is None or other in listed[interface].links

    @cached_property
    def _listed_interfaces(self) -> dict[str, tuple[Interface, ...]]:
        return {node.name: node.interfaces for node in self.nodes if node.interfaces}

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

    @property
    def rates(self) -> list[float]:
        """Bytes/s of both directions of the links whose rates are known."""
        return [rate for link in self.links for _, _, rate in link.directions]

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

    def without_addresses(self) -> ClusterSpec:
        """The same cluster, of whose nodes and interfaces no address is known."""
        nodes = [
            {
                **node.model_dump(),
                "address": None,
                "interfaces": [{**one.model_dump(), "address": None} for one in node.interfaces],
            }
            for node in self.nodes
        ]
        return self._replace(nodes=nodes)

    def with_interfaces(self, count: int) -> ClusterSpec:
        """The same cluster with the first ``count`` (at least 1) interfaces of each node and what these lead to."""
        nodes = [node.model_copy(update={"interfaces": node.interfaces[:count]}) for node in self.nodes]
        kept = {
            node.name: {end for interface in node.interfaces for end in interface.links}
            for node in nodes
            if node.interfaces
        }
        links = [
            link
            for link in self.links
            if link.b in kept.get(link.a, (link.b,)) and link.a in kept.get(link.b, (link.a,))
        ]
        lost = set(stranded(nodes, self.switches, links))
        return self._replace(
            nodes=[node.model_dump() for node in nodes],
            switches=[switch for switch in self.switches if switch not in lost],
            links=[link.model_dump() for link in links if not {link.a, link.b} & lost],
        )

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
        check_interfaces(self.nodes, self.links)
        check_paths(self)
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
