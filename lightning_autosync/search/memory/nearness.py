"""The entries of other jobs from which a job can start, nearest first."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from lightning_autosync.cluster import ClusterSpec, LinkGraph
from lightning_autosync.plan import SEMANTICS
from lightning_autosync.search.memory.entry import TunedPlan, TuningKey

RATE_STEP = 1.25
"""Factor between rates that count as one step apart; measured rates vary by less."""

MOST_NODES = 32
"""Number of nodes, evenly chosen, whose rates are compared: the time to route all pairs grows with their square."""


@dataclass(frozen=True)
class Source:
    """An entry of another job.

    Attributes:
        entry: the entry. Its plan fits the job only if ``same_model`` is True and the number of ranks is equal.
        same_model: whether names, shapes, dtypes and kinds of the parameters are equal.
        same_hosts: whether each rank is on the same host.
        rate_steps: largest difference of rates, in steps of a factor `RATE_STEP`; None if it is unknown.
    """

    entry: TunedPlan
    same_model: bool
    same_hosts: bool
    rate_steps: int | None


def nearest(key: TuningKey, cluster: ClusterSpec | None, entries: Iterable[TunedPlan]) -> list[Source]:
    """The entries with the key's model, hosts or rates, nearest first.

    The order is by difference of rates, then the same model before others, then by the ratio of the models' bytes, then
    newest first. Entries with the key's own fingerprint, for other devices, or with plans that the key's semantics do
    not allow are left out.

    Args:
        key: key of the job.
        cluster: the job's cluster; None if no rate is known yet, so equal hosts count as equal rates.
        entries: the entries.
    """
    own = None if cluster is None or not cluster.measured else _shares(cluster)
    allowed = SEMANTICS.index(key.semantics)
    found = []
    for entry in entries:
        if entry.key.fingerprint == key.fingerprint or entry.key.device != key.device:
            continue
        if SEMANTICS.index(entry.plan.semantics) > allowed:
            continue
        same_model, same_hosts = entry.key.model == key.model, entry.key.hosts == key.hosts
        if own is None:
            steps = 0 if same_hosts else None
        else:
            assert cluster is not None
            steps = _difference(own, entry.cluster) if entry.cluster.rank_nodes == cluster.rank_nodes else None
        if same_model or same_hosts or steps is not None:
            found.append(Source(entry, same_model, same_hosts, steps))
    size = key.workload.bytes
    return sorted(found, key=lambda source: _order(source, size))


def _order(source: Source, size: int) -> tuple[float, bool, float, float]:
    steps = math.inf if source.rate_steps is None else source.rate_steps
    ratio = abs(math.log(max(source.entry.key.workload.bytes, 1) / max(size, 1)))
    return steps, not source.same_model, ratio, -source.entry.written.timestamp()


def _difference(own: NDArray[numpy.float64], cluster: ClusterSpec) -> int | None:
    """Steps by which rates differ at most from those of a cluster with equal placement of ranks; None if unknown."""
    if not cluster.measured:
        return None
    ratios = numpy.abs(numpy.log(own / _shares(cluster)))
    return round(float(ratios.max(initial=0.0)) / math.log(RATE_STEP))


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
