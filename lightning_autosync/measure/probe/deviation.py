"""How far the links that a probe found are from those that were set, where links are emulated."""

from __future__ import annotations

from collections.abc import Iterator

import networkx

from lightning_autosync.cluster import ClusterSpec

Cut = tuple[frozenset[int], frozenset[int]]
"""Ranks on the sending and on the receiving side of a link, one direction."""


def settings_of(found: ClusterSpec, truth: ClusterSpec) -> list[tuple[float | None, float | None]]:
    """For each link found the rates it is set to, each way; None where nothing like it was set.

    Links are the same if they part the ranks alike: links in a row with nobody between them are, to whoever
    measures from the ends, one link of the least rate. Links that part nothing, as in a ring, are told by their ends.
    """
    rates: dict[Cut, float] = {}
    for cut, rate in _cuts(truth):
        rates[cut] = min(rate, rates.get(cut, rate))
    of_links = [rates.get(cut) for cut, _ in _cuts(found)]
    return list(zip(of_links[::2], of_links[1::2], strict=True))


def _cuts(cluster: ClusterSpec) -> Iterator[tuple[Cut, float]]:
    """For each link its cut and its rate, there and back."""
    graph = networkx.Graph([(link.a, link.b) for link in cluster.links])
    bridges = {frozenset(bridge) for bridge in networkx.bridges(graph)}
    ranks = {node.name: frozenset(cluster.ranks_of(index)) for index, node in enumerate(cluster.nodes)}
    for link in cluster.links:
        assert link.bandwidth is not None
        assert link.reverse_bandwidth is not None
        near, far = {link.a}, {link.b}
        if frozenset((link.a, link.b)) in bridges:
            graph.remove_edge(link.a, link.b)
            near, far = (
                networkx.node_connected_component(graph, link.a),
                networkx.node_connected_component(graph, link.b),
            )
            graph.add_edge(link.a, link.b)
        one, other = _members(near, ranks), _members(far, ranks)
        yield (one, other), link.bandwidth
        yield (other, one), link.reverse_bandwidth


def _members(places: set[str], ranks: dict[str, frozenset[int]]) -> frozenset[int]:
    return frozenset(rank for place in places for rank in ranks.get(place, ()))
