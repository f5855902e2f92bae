"""The probe inside a job: every rank calls `probe_ranks` and all get the same answer."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine.cpu_scheduling import set_batch_scheduling
from lightning_autosync.measure.probe.constants import fit_constants
from lightning_autosync.measure.probe.costs import measure_collectives, measure_costs
from lightning_autosync.measure.probe.flows import RoundTrip
from lightning_autosync.measure.probe.meter import Meter
from lightning_autosync.measure.probe.shape import Hosts, make_cluster
from lightning_autosync.measure.probe.survey import FairCluster, Flow, Survey, take_survey

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
    """How well flows use the links that they share.

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


FORMAT = "autosync-probe/1"
_PRIORITY = -10
"""Niceness of a probe's ranks. Other processes could only make links look slower and hosts more expensive."""


def probe_ranks(
    name: str,
    scheduling: str,
    head: float,
    window: float,
    every_pair: bool | None,
    constants: bool,
    accelerated: bool,
    addresses: bool,
    timeout: float,
) -> dict[str, Any]:
    """Measure links and hosts of the default process group; collective.

    Args:
        name: of the cluster found.
        scheduling: ``batch`` puts the ranks under SCHED_BATCH once links are measured, for which ranks must wake soon.
        head, window, every_pair, constants, accelerated: as in `Settings`.
        addresses: whether the nodes' addresses belong into the cluster.
        timeout: seconds in which two ranks must reach each other.

    Returns:
        Plain data: what `measure_links` returns, ``constants`` (the document; None unless asked for) with the ``costs``
        that they come from, and the effort.
    """
    begin = time.perf_counter()
    _go_first()
    small = {"none": measure_collectives()} if constants else {}
    meter = Meter(head, window, timeout)
    answer: dict[str, Any] = {"format": FORMAT, **measure_links(meter, name, every_pair, addresses), "constants": None}
    if constants:
        if scheduling == "batch":
            set_batch_scheduling()
            small["batch"] = measure_collectives()
        costs = measure_costs([members[0] for members in meter.nodes])
        answer["costs"] = {**costs, "small_collectives": small}
        devices = [len(members) for members in meter.nodes]
        answer["constants"] = fit_constants(answer, scheduling, meter.machines, devices, accelerated).to_dict()
    return {**answer, "transfers": meter.transfers, "seconds": time.perf_counter() - begin}


def probe_hosts(leaders: Sequence[int], scheduling: str) -> dict[str, Any]:
    """What the hosts of the default process group cost, without a look at its links; collective.

    Args:
        leaders: the first rank of each node.
        scheduling: the policy that the ranks are under.

    Returns:
        What `fit_constants` takes for a probe, of links without latency.
    """
    costs = measure_costs(leaders)
    small = {scheduling: measure_collectives()}
    return {"costs": {**costs, "small_collectives": small}, "pairs": [], "sharing": None, "burst": None}


def _go_first() -> None:
    """Give the probe priority over other processes of this machine, if the kernel allows it."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
