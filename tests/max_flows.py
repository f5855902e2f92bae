"""The best rate of a broadcast from all ranks, by maximum flows: independent of packed trees."""

from __future__ import annotations

import networkx

_SOURCE = "source"  # no name of a place: nodes and switches of these clusters have others


def shard_rate(links: list[tuple[str, str, float]], ranks: tuple[str, ...]) -> float:
    """Largest rate at which every rank can broadcast its shard to all others: least bandwidth out of a cut per rank.

    A rate is feasible if a source that gives it to every rank can send all of it to any one rank. A cut that is too
    small gives the next rate to try (Dinkelbach's method), so the result is the exact ratio of a cut.
    """
    graph = networkx.DiGraph()
    for source, target, bandwidth in links:
        graph.add_edge(source, target, capacity=bandwidth)
    rate = min(sum(one["capacity"] for one in graph[rank].values()) for rank in ranks)
    improved = True
    while improved:
        improved = False
        for rank in ranks:
            for other in ranks:
                graph.add_edge(_SOURCE, other, capacity=rate)
            value, (inside, _) = networkx.minimum_cut(graph, _SOURCE, rank)
            within = sum(other in inside for other in ranks)
            if value < rate * len(ranks) * (1 - 1e-9) and within:
                out = sum(graph[a][b]["capacity"] for a, b in networkx.edge_boundary(graph, inside - {_SOURCE}))
                improved |= out / within < rate * (1 - 1e-9)
                rate = min(rate, out / within)
    return rate
