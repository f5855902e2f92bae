"""The entries of other jobs whose plans a search can start with, nearest first."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy
from numpy.typing import NDArray

from lightning_autosync.cluster import ClusterSpec, LinkGraph
from lightning_autosync.search.memory.entry import TunedPlan, TuningKey

NEAR = 1.25
"""Largest factor between rates that count as near; measured rates vary by less."""

MOST_NODES = 32
"""Number of nodes, evenly chosen, whose rates are compared: the time to route all pairs grows with their square."""


def nearest(key: TuningKey, cluster: ClusterSpec, entries: Iterable[TunedPlan]) -> list[TunedPlan]:
    """The entries with the key's model and settings, equal places of ranks and near rates, nearest first.

    Hosts and versions may differ. Entries with equally near rates are in the order newest first.

    Args:
        key: key of the job.
        cluster: the job's cluster, with rates.
        entries: the entries.
    """
    own, found = _shares(cluster), list[tuple[float, float, TunedPlan]]()
    for entry in entries:
        if entry.cluster.rank_nodes == cluster.rank_nodes and _settings(entry.key) == _settings(key):
            ratio = numpy.exp(numpy.abs(numpy.log(own / _shares(entry.cluster)))).max(initial=1.0)
            found.append((round(float(ratio), 2), -entry.written.timestamp(), entry))
    return [entry for ratio, _, entry in sorted(found, key=lambda each: each[:2]) if ratio <= NEAR]


def _settings(key: TuningKey) -> tuple[object, ...]:
    """What has to be equal so that a plan of one key serves another."""
    return key.model, key.device, key.semantics, key.bucket_bytes, key.overlap


def _shares(cluster: ClusterSpec) -> NDArray[numpy.float64]:
    """[ordered pairs of `MOST_NODES` nodes] bytes/s of each flow, if they all send at once and share links equally.

    Unlike rates of links they can be compared whatever links and switches a cluster is described by.
    """
    graph = LinkGraph(cluster)
    firsts = [cluster.ranks_of(node)[0] for node in range(len(cluster.nodes))]
    ranks = firsts[:: math.ceil(len(firsts) / MOST_NODES)]
    flows = [(i, j) for i in ranks for j in ranks if i != j]
    shares = graph.capacities / numpy.maximum(graph.loads(flows), 1)
    return numpy.array([shares[list(graph.route(*flow))].min() for flow in flows])
