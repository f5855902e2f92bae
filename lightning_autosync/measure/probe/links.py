"""The links of a job: surveyed by a `Meter`, and told as a cluster and as what each node and pair of nodes got."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.measure.probe.meter import Meter
from lightning_autosync.measure.probe.shape import Hosts, make_cluster
from lightning_autosync.measure.probe.sharing import FairCluster, Flow
from lightning_autosync.measure.probe.survey import Survey, take_survey
from lightning_autosync.measure.probe.trips import RoundTrip

SMALL = 4
"""Nodes up to which every pair is measured alone unless the settings say otherwise."""


def measure_links(meter: Meter, name: str, every_pair: bool | None, addresses: bool) -> dict[str, Any]:
    """Measure; collective.

    Args:
        meter: of the job.
        name: of the cluster found.
        every_pair: as in `Settings`.
        addresses: whether the nodes' addresses belong into the cluster.

    Returns:
        Plain data: ``cluster`` (the document), ``nodes`` (bytes/s up and down, alone and while everybody sends),
        ``own_trip`` (seconds that a round trip takes without a wire), ``pairs`` (see `_pairs`), ``sharing`` and
        ``burst``.
    """
    count = len(meter.nodes)
    trips = _idle_trips(meter)
    waking = meter.own_trip()
    survey, loaded = None, {}
    if count > 1:
        survey = take_survey(meter, count, count <= SMALL if every_pair is None else every_pair)
        loaded = meter.loaded_trips(survey.alone)
    one_way = {pair: max(0.0, trip.least - waking) / 2 for pair, trip in trips.items()}
    cluster = make_cluster(name, _hosts(meter, addresses), survey, one_way)
    return {
        "cluster": cluster.to_dict(),
        "nodes": _nodes(survey, cluster),
        "own_trip": waking,
        "pairs": [] if survey is None else [_pair(survey, pair, trips[pair], loaded) for pair in trips],
        "sharing": _sharing(meter, survey, cluster),
        "burst": float(numpy.median(meter.bursts)) if meter.bursts else None,
    }


def _idle_trips(meter: Meter) -> dict[Flow, RoundTrip]:
    """Between each two nodes, the lower first, while nobody else sends."""
    leaders = [members[0] for members in meter.nodes]
    pairs = [(i, j) for i in range(len(leaders)) for j in range(i + 1, len(leaders))]
    trips = meter.round_trips((leaders[i], leaders[j]) for i, j in pairs)
    return {(i, j): trips[leaders[i], leaders[j]] for i, j in pairs}


def _hosts(meter: Meter, addresses: bool) -> Hosts:
    """Names, and what two ranks of one node make of its memory."""
    several = next((members for members in meter.nodes if len(members) > 1), None)
    bandwidth, latency = None, 0.0
    if several is not None:
        pair = several[0], several[1]
        bandwidth = meter.rank_rates([pair])[0]
        latency = meter.round_trips([pair])[pair].least / 2
    distinct = len(set(meter.hosts)) == len(meter.hosts)
    names = meter.hosts if distinct else [f"node{node}" for node in range(len(meter.hosts))]
    return Hosts(meter.nodes, names, meter.addresses if addresses else None, bandwidth, latency)


def _sharing(meter: Meter, survey: Survey | None, cluster: ClusterSpec) -> dict[str, float] | None:
    """What flows make of links that they share.

    ``everybody``: used share of the links that are full while all nodes send to all others; ``crowding``: such links
    on the way of a flow; both means. Rates in sum over those of flows alone: ``opposite``, two flows that face each
    other; ``fan``, one node to all others, over its fastest flow.
    """
    if survey is None:
        return None
    (i, j), alone = max(survey.alone.items(), key=lambda item: item[1])
    back = survey.alone.get((j, i), alone)
    opposite = sum(meter.rates([(i, j), (j, i)])) / (alone + back)
    found = {"opposite": opposite, "fan": max(survey.up[i] / alone, 0.0)}
    if survey.nodes > 2:
        flows = _everybody(survey.nodes)
        used, crowding = FairCluster(cluster).full(flows, [float(survey.full[flow]) for flow in flows])
        found |= {"everybody": used, "crowding": crowding}
    return found


def _everybody(nodes: int) -> list[Flow]:
    return [(i, j) for i in range(nodes) for j in range(nodes) if i != j]


def _nodes(survey: Survey | None, cluster: ClusterSpec) -> list[dict[str, Any]]:
    if survey is None:
        return [{"name": cluster.nodes[0].name}]
    sent, received = numpy.nansum(survey.full, axis=1), numpy.nansum(survey.full, axis=0)
    return [
        {
            "name": node.name,
            "up": survey.up[index],
            "down": survey.down[index],
            "up_loaded": float(sent[index]),
            "down_loaded": float(received[index]),
        }
        for index, node in enumerate(cluster.nodes)
    ]


def _pair(survey: Survey, pair: Flow, idle: RoundTrip, loaded: Mapping[Flow, RoundTrip]) -> dict[str, Any]:
    """A pair of nodes: the round trip while nobody else sends; and for each way, the lower node's first, the rate alone
    and while everybody sends to everybody, and the round trip while that way is full. None where not measured.
    """
    ways = pair, pair[::-1]
    trips = [loaded.get(way) for way in ways]
    return {
        "nodes": list(pair),
        "round_trip": asdict(idle),
        "round_trip_loaded": [None if trip is None else asdict(trip) for trip in trips],
        "alone": [survey.alone.get(way) for way in ways],
        "loaded": _rounded([survey.full[way] for way in ways]),
    }


def _rounded(rates: Sequence[float]) -> list[float]:
    return [round(float(rate)) for rate in rates]
