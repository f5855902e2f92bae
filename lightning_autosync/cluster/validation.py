"""Whether the parts of a cluster fit together. Each check raises ``ValueError`` naming the field."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import networkx

from lightning_autosync.cluster.elements import MOST_RANKS, Link, Node


def check_names(nodes: Sequence[Node], switches: Sequence[str]) -> None:
    """No name is given twice."""
    seen: set[str] = set()
    fields = [(f"nodes[{index}].name", node.name) for index, node in enumerate(nodes)]
    fields += [(f"switches[{index}]", name) for index, name in enumerate(switches)]
    for field, name in fields:
        if name in seen:
            raise ValueError(f"{field}: '{name}' is taken; nodes and switches need different names")
        seen.add(name)


def check_size(nodes: Sequence[Node]) -> None:
    """There are no more ranks than anything here is made for."""
    if (ranks := sum(node.devices for node in nodes)) > MOST_RANKS:
        raise ValueError(f"nodes: {ranks} devices in all; allowed: {MOST_RANKS} at most")


def check_links(nodes: Sequence[Node], switches: Sequence[str], links: Sequence[Link]) -> None:
    """Links join known ends, no two the same, and all of them state their rate or none does."""
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
    """Every node and switch can be reached from the first node."""
    names = [*(node.name for node in nodes), *switches]
    graph = networkx.Graph([(link.a, link.b) for link in links])
    graph.add_nodes_from(names)
    reached = networkx.node_connected_component(graph, names[0])
    stranded = [name for name in names if name not in reached]
    if stranded:
        raise ValueError(f"links: no way from '{names[0]}' to {', '.join(map(repr, stranded))}")


def check_rank_order(nodes: Sequence[Node], rank_order: Sequence[str] | None) -> None:
    """The order, if one is given, names each node once per device."""
    if rank_order is None:
        return
    devices = {node.name: node.devices for node in nodes}
    for index, name in enumerate(rank_order):
        if name not in devices:
            raise ValueError(f"rank_order[{index}]: '{name}' is not a node; there are {', '.join(devices)}")
    occurrences = Counter(rank_order)
    for name, count in devices.items():
        if occurrences[name] != count:
            raise ValueError(
                f"rank_order: '{name}' occurs {occurrences[name]} times, expected {count}, once per device; "
                f"the order has {len(rank_order)} entries for {sum(devices.values())} ranks"
            )
