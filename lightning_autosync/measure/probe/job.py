"""The probe inside a job: every rank calls `probe_ranks`, and all get the same answer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import counted
from lightning_autosync.engine.cpu_scheduling import set_batch_scheduling
from lightning_autosync.measure.probe.constants import fit_constants
from lightning_autosync.measure.probe.costs import measure_collectives, measure_costs
from lightning_autosync.measure.probe.flows import RoundTrip
from lightning_autosync.measure.probe.meter import Meter
from lightning_autosync.measure.probe.shape import Hosts, make_cluster, node_names
from lightning_autosync.measure.probe.survey import FairCluster, Flow, Survey, everybody, take_survey
from lightning_autosync.measure.progress import Report, silent

SMALL = 4
"""Largest number of nodes for which every pair is measured alone unless the settings say otherwise."""


class _Parts:
    """Tells a `Report` which of the parts of a probe is under way.

    Args:
        total: number of parts.
    """

    def __init__(self, total: int, report: Report) -> None:
        self._done, self._total, self._what, self._report = -1, total, "", report

    def begin(self, what: str) -> None:
        """Begin a part, which ends the one before it; an empty name ends the last one."""
        self._done, self._what = self._done + 1, what
        self._report(self._done, self._total, what)

    def transferred(self, transfers: int) -> None:
        """Tell the number of transfers so far."""
        self._report(self._done, self._total, f"{self._what}, {counted(transfers, 'transfer')}")


def measure_links(
    meter: Meter, name: str, every_pair: bool | None, addresses: bool, begin: Callable[[str], None]
) -> dict[str, Any]:
    """Measure the links of a job; collective.

    Args:
        every_pair: as in `ProbeSettings`.
        addresses: whether the cluster includes the nodes' addresses.
        begin: called with the name of each of three parts when it begins.

    Returns:
        Plain data: ``cluster`` (the document), ``nodes`` (bytes/s up and down, alone and while all nodes send),
        ``own_trip`` (seconds of a round trip without a wire), ``pairs`` (see `_pair`), ``sharing`` (see `_sharing`) and
        ``burst`` (bytes).
    """
    count = len(meter.nodes)
    begin("round trips")
    trips = _idle_trips(meter)
    waking = meter.own_trip()
    survey = None
    begin("rates")
    if count > 1:
        survey = take_survey(meter, count, count <= SMALL if every_pair is None else every_pair)
    begin("links under load")
    loaded = {} if survey is None else meter.loaded_trips(survey.alone)
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
    """Round trips of each pair of nodes, the lower first, while nobody else sends."""
    leaders = [members[0] for members in meter.nodes]
    pairs = [(i, j) for i in range(len(leaders)) for j in range(i + 1, len(leaders))]
    trips = meter.round_trips((leaders[i], leaders[j]) for i, j in pairs)
    return {(i, j): trips[leaders[i], leaders[j]] for i, j in pairs}


def _hosts(meter: Meter, addresses: bool) -> Hosts:
    """Names and addresses of the nodes, and rate and latency between two ranks of one node."""
    several = next((members for members in meter.nodes if len(members) > 1), None)
    bandwidth, latency = None, 0.0
    if several is not None:
        pair = several[0], several[1]
        bandwidth = meter.rank_rates([pair])[0]
        latency = meter.round_trips([pair])[pair].least / 2
    return Hosts(meter.nodes, node_names(meter.hosts), meter.addresses if addresses else None, bandwidth, latency)


def _sharing(meter: Meter, survey: Survey | None, cluster: ClusterSpec) -> dict[str, float] | None:
    """How well flows use the links that they share.

    - ``everybody``: used share of the full links while all nodes send to all others, mean over links.
    - ``crowding``: number of such links on a flow's route, mean over flows.
    - ``opposite``: total rate of two opposite flows, relative to their rates alone.
    - ``fan``: total rate of one node to all others, relative to its fastest single flow.
    """
    if survey is None:
        return None
    (i, j), alone = max(survey.alone.items(), key=lambda item: item[1])
    back = survey.alone.get((j, i), alone)
    opposite = sum(meter.rates([(i, j), (j, i)])) / (alone + back)
    found = {"opposite": opposite, "fan": max(survey.up[i] / alone, 0.0)}
    if survey.nodes > 2:
        flows = everybody(survey.nodes)
        used, crowding = FairCluster(cluster).full(flows, [float(survey.full[flow]) for flow in flows])
        found |= {"everybody": used, "crowding": crowding}
    return found


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
    """Plain data about a pair of nodes.

    ``round_trip`` is measured while nobody else sends. The other lists have an entry for each direction, the lower
    node's first: ``alone`` (bytes/s alone), ``loaded`` (bytes/s while all nodes send to all) and ``round_trip_loaded``
    (while this direction is full). Entries are None where not measured.
    """
    ways = pair, pair[::-1]
    trips = [loaded.get(way) for way in ways]
    return {
        "nodes": list(pair),
        "round_trip": asdict(idle),
        "round_trip_loaded": [None if trip is None else asdict(trip) for trip in trips],
        "alone": [survey.alone.get(way) for way in ways],
        "loaded": [round(float(survey.full[way])) for way in ways],
    }


_PRIORITY = -10
"""Niceness of a probe's ranks. Other processes can only make links look slower and hosts more expensive."""


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
    report: Report = silent,
) -> dict[str, Any]:
    """Measure links and hosts of the default process group; collective.

    Args:
        scheduling: ``batch`` puts the ranks under SCHED_BATCH, but only after the links are measured: round trips need
            ranks that wake at once.
        head, window, every_pair, constants, accelerated: as in `ProbeSettings`.
        addresses: whether the cluster includes the nodes' addresses.
        timeout: seconds within which two ranks must reach each other.
        report: told of each part and each transfer.

    Returns:
        Plain data: what `measure_links` returns, ``constants`` (the document; None unless requested) with the ``costs``
        from which they are fitted, and the number of ``transfers`` and ``seconds`` of the probe.
    """
    begin = time.perf_counter()
    _go_first()
    parts = _Parts(3 + constants, report)
    small = {"none": measure_collectives()} if constants else {}  # before the ranks switch to SCHED_BATCH
    meter = Meter(head, window, timeout, parts.transferred)
    answer: dict[str, Any] = {**measure_links(meter, name, every_pair, addresses, parts.begin), "constants": None}
    if constants:
        parts.begin("costs of hosts")
        if scheduling == "batch":
            set_batch_scheduling()
            small["batch"] = measure_collectives()
        costs = measure_costs([members[0] for members in meter.nodes])
        answer["costs"] = {**costs, "small_collectives": small}
        devices = [len(members) for members in meter.nodes]
        answer["constants"] = fit_constants(answer, scheduling, meter.machines, devices, accelerated).to_dict()
    parts.begin("")
    return {**answer, "transfers": meter.transfers, "seconds": time.perf_counter() - begin}


def probe_hosts(leaders: Sequence[int], scheduling: str) -> dict[str, Any]:
    """Measure the hosts of the default process group but not its links; collective.

    Args:
        leaders: first rank of each node.

    Returns:
        A probe's answer for `fit_constants`, with links that have no latency.
    """
    costs = measure_costs(leaders)
    small = {scheduling: measure_collectives()}
    return {"costs": {**costs, "small_collectives": small}, "pairs": [], "sharing": None, "burst": None}


def _go_first() -> None:
    """Give the probe priority over other processes on this machine, if the kernel allows it."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
