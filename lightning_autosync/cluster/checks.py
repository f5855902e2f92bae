"""Checks of clusters. Each raises ``ValueError`` with the field at fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from lightning_autosync.cluster.shapes import MOST_RANKS
from lightning_autosync.documents import allowed_names

if TYPE_CHECKING:
    from lightning_autosync.cluster.spec import ClusterSpec, Link, Node


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
    known = dict.fromkeys([*(node.name for node in nodes), *switches])
    seen: set[frozenset[str]] = set()
    for index, link in enumerate(links):
        for field, name in (("a", link.a), ("b", link.b)):
            if name not in known:
                told = allowed_names(name, known)
                raise ValueError(f"links[{index}].{field}: '{name}' is neither a node nor a switch; {told}")
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
    if lost := stranded(nodes, switches, links):
        raise ValueError(f"links: no path from '{nodes[0].name}' to {', '.join(map(repr, lost))}")


def stranded(nodes: Sequence[Node], switches: Sequence[str], links: Sequence[Link]) -> list[str]:
    """Names of the nodes and switches to which no links lead from the first node."""
    names = [*(node.name for node in nodes), *switches]
    places = {name: place for place, name in enumerate(names)}
    ends = numpy.array([(places[link.a], places[link.b]) for link in links], dtype=numpy.int32).reshape(-1, 2)
    graph = coo_array((numpy.ones(len(ends)), ends.T), shape=(len(names), len(names)))
    _, parts = connected_components(graph, directed=False)
    return [name for name, part in zip(names, parts, strict=True) if part != parts[0]]


def check_interfaces(nodes: Sequence[Node], links: Sequence[Link]) -> None:
    """Raise ``ValueError`` unless each link of a node that lists interfaces belongs to one of these.

    Their names and addresses must differ.
    """
    around: dict[str, set[str]] = {node.name: set() for node in nodes if node.interfaces}
    for link in links:
        for end, other in ((link.a, link.b), (link.b, link.a)):
            if end in around:
                around[end].add(other)
    for index, node in enumerate(nodes):
        names: set[str] = set()
        owner: dict[str, str] = {}
        addresses: dict[str, str] = {}
        for number, interface in enumerate(node.interfaces):
            where = f"nodes[{index}].interfaces[{number}]"
            if interface.name in names:
                raise ValueError(f"{where}.name: '{interface.name}' is the name of another interface of the node")
            names.add(interface.name)
            if interface.address is not None:
                first = addresses.setdefault(interface.address, interface.name)
                if first != interface.name:
                    raise ValueError(
                        f"{where}.address: '{interface.address}' is the address of interface '{first}', too; give each "
                        "interface its own"
                    )
            for place, other in enumerate(interface.links):
                field = f"{where}.links[{place}]"
                if other not in around[node.name]:
                    linked = ", ".join(sorted(around[node.name])) or "none"
                    raise ValueError(f"{field}: '{node.name}' has no link to '{other}'; allowed: {linked}")
                if other in owner:
                    raise ValueError(f"{field}: the link to '{other}' is already that of interface '{owner[other]}'")
                owner[other] = interface.name
        if node.interfaces and (missing := sorted(around[node.name] - owner.keys())):
            raise ValueError(f"nodes[{index}].interfaces: none has the link to '{missing[0]}'; add it to one")


def check_rank_order(nodes: Sequence[Node], rank_order: Sequence[str] | None) -> None:
    """Raise ``ValueError`` if an order is given that does not contain each node once per device."""
    if rank_order is None:
        return
    devices = {node.name: node.devices for node in nodes}
    for index, name in enumerate(rank_order):
        if name not in devices:
            raise ValueError(f"rank_order[{index}]: '{name}' is not a node; {allowed_names(name, devices)}")
    occurrences = Counter(rank_order)
    for name, count in devices.items():
        if occurrences[name] != count:
            raise ValueError(
                f"rank_order: '{name}' occurs {occurrences[name]} times, expected {count}, once per device; "
                f"the order has {len(rank_order)} entries for {sum(devices.values())} ranks"
            )


def check_paths(cluster: ClusterSpec) -> None:
    """Raise ``ValueError`` if an interface that all nodes have does not lead from each node to all others."""
    if not any(node.interfaces for node in cluster.nodes):
        return
    for interface in range(cluster.interface_count):
        usable = [link for link in cluster.links if cluster.carries(interface, link)]
        nodes = {node.name for node in cluster.nodes}
        if lost := [name for name in stranded(cluster.nodes, cluster.switches, usable) if name in nodes]:
            raise ValueError(
                f"nodes: no path from interface {interface} of '{cluster.nodes[0].name}' to interface {interface} of "
                f"{', '.join(map(repr, lost))}; list interfaces of one network at the same place in each node"
            )
