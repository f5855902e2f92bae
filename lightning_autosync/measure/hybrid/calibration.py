"""`calibrate`: rates of computation and collectives, measured on live workers."""

from __future__ import annotations

import logging
import statistics
from collections import defaultdict
from collections.abc import Sequence

import numpy

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.hybrid.conversions import COLLECTIVES, Collective, sent
from lightning_autosync.hybrid.mesh import Links, near_order, shapes
from lightning_autosync.hybrid.plan import groups_along
from lightning_autosync.hybrid.pricing import CollectiveTiming, fit_rate, latencies, wire_seconds
from lightning_autosync.hybrid.rates import HybridRates
from lightning_autosync.measure.hybrid import rate_calls
from lightning_autosync.measure.session import MeasurementSession

SIZES = (4096, 1 << 18, 1 << 21)
"""Input bytes per rank of the measured collectives."""
REPETITIONS = 5
_log = logging.getLogger(__name__)


def calibrate(session: MeasurementSession, cluster: ClusterSpec) -> HybridRates:
    """Measure the rates of a job's ranks while all of them work.

    Args:
        cluster: cluster of the ranks, with known rates of links.

    Raises:
        WorkerError: a worker failed.
        ClusterError: the rates of the links are unknown.
    """
    links, ranks = Links(cluster), near_order(cluster)
    timings: dict[Collective, list[CollectiveTiming]] = defaultdict(list)
    # One mesh for each number of dimensions suffices: together they have small groups and the group of all ranks.
    for mesh in {len(shape): shape for shape in shapes(cluster.world_size)}.values():
        _log.info("measuring collectives on a mesh of %s", " x ".join(map(str, mesh)))
        for kind, timing in _timings(session, links, mesh, ranks):
            timings[kind].append(timing)
    rates = {kind: fit_rate(timings[kind]) for kind in COLLECTIVES}
    computed = session.run(rate_calls.compute_rates)
    compute = {name: statistics.median(rank[name] for rank in computed) for name in computed[0]}
    return HybridRates(backend="gloo", **compute, **rates)


def _timings(
    session: MeasurementSession, links: Links, mesh: tuple[int, ...], ranks: Sequence[int]
) -> list[tuple[Collective, CollectiveTiming]]:
    by_rank = session.run(
        rate_calls.collective_seconds, mesh=mesh, places=list(ranks), sizes=SIZES, repetitions=REPETITIONS
    )
    framing, array, found = HybridRates().framing, numpy.array(ranks).reshape(mesh), []
    for measured in zip(*by_rank, strict=True):
        dimension, kind, payload, _ = measured[0]
        pace = links.pace(groups_along(array, (dimension,)))
        bytes_sent = payload * sent(kind, mesh[dimension])
        timing = CollectiveTiming(
            mesh[dimension],
            bytes_sent,
            bytes_sent * framing * wire_seconds(kind, pace, gloo=True),
            pace.latency * latencies(kind, mesh[dimension], gloo=True),
            max(seconds for *_, seconds in measured),
        )
        found.append((kind, timing))
    return found
