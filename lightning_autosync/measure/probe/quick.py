"""The hosts and links of a live job in a few seconds: every rank calls `survey_job`, and all get the same answer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine.collectives import broadcast_json
from lightning_autosync.measure.errors import LaunchError
from lightning_autosync.measure.probe.description import check_places, far_links, far_rates
from lightning_autosync.measure.probe.mesh_meter import MeshMeter
from lightning_autosync.measure.probe.shape import Hosts, make_cluster, node_names
from lightning_autosync.measure.probe.survey import DECISIVE_WINDOWS, FULL_WINDOWS, Flow, Survey, everybody, take_survey


@dataclass(frozen=True)
class JobSurvey:
    """What a job's ranks found out about where they run.

    Attributes:
        cluster: nodes with their ranks and addresses. Its links have rates and latencies unless there is a ``fault``.
            A link that all other nodes together cannot fill has their rate. Rates within a node are not measured.
        seconds: seconds of the survey.
        machines: number of distinct machines (kernels).
        fault: why there are no rates; None if there are, or if all ranks share a node.
    """

    cluster: ClusterSpec
    seconds: float
    machines: int
    fault: str | None


def survey_job(timeout: float, limit: float = 10.0) -> JobSurvey:
    """Find the hosts of the default process group, and measure the links between them; collective.

    `lightning_autosync.measure.probe.job` takes longer and measures more: each rate until it repeats, delays under
    load, and hosts.

    Args:
        timeout: seconds within which two ranks must reach each other.
        limit: seconds that the survey may take. Measurements that would only confirm others are left out if the time is
            short. If the others take longer, rates remain unknown.

    Raises:
        LaunchError: on every rank, if the system is not Linux, or if a rank cannot read the id of its machine.
    """
    meter = MeshMeter(timeout, limit)
    cluster, fault = None, None

    def describe() -> ClusterSpec:
        survey = take_survey(meter, len(meter.nodes), every_pair=None)
        if survey.nodes == 2:
            survey.paces.clear()
        return _cluster(meter, survey)

    if len(meter.nodes) > 1:
        try:
            with meter.connected():
                cluster = meter.lead(describe)
        except LaunchError as error:
            fault = str(error)
    if cluster is None:  # on other ranks it is replaced by that of rank 0
        cluster = _cluster(meter)
    document, seconds = broadcast_json([cluster.to_dict(), meter.elapsed()])
    return JobSurvey(ClusterSpec.from_dict(document, source="survey"), seconds, meter.machines, fault)


def compare_with_job(described: ClusterSpec, timeout: float, limit: float = 3.0) -> list[str]:
    """Compare a description with the nodes of the job, and with what these send and receive; collective.

    Rates are compared if the ranks run on the described nodes. All nodes then send to all others at once, which takes
    about half a second. This is repeated if a link that several nodes share has a rate that is far from the
    description. Otherwise a node whose rate is far is measured again by itself. A rate is told only if it is far in the
    second measurement, too.

    Args:
        described: the description. Without rates, only nodes are compared.
        timeout: seconds within which two ranks must reach each other.
        limit: seconds that this may take, if rates are far. Nodes for which there is no time are not told.

    Returns:
        On rank 0, a sentence on ranks that run on other nodes than described, or else phrases on links with their
        described and measured rates, without full stops. The list is empty on other ranks, if the description fits, and
        if it cannot be compared: a rank cannot read the id of its machine, or ranks cannot connect in time.
    """
    if sys.platform != "linux":
        return []
    try:
        meter = MeshMeter(timeout, limit)
    except LaunchError:
        return []
    places = [list(described.ranks_of(node)) for node in range(len(described.nodes))]
    if sorted(places) != sorted(meter.nodes):
        return _told(check_places(described, _cluster(meter))) if meter.rank == 0 else []
    if len(places) < 2 or not described.measured:
        return []
    order = [meter.nodes.index(ranks) for ranks in places]

    try:
        with meter.connected(slots=2):
            return meter.lead(lambda: _far(meter, described, order)) or []
    except LaunchError:
        return []


def _told(faults: Sequence[str]) -> list[str]:
    """The first sentence without its full stop, and whether there are others."""
    first, *others = (text.removesuffix(".") for text in faults)
    return [f"{first}; other ranks likewise" if others else first]


def _cluster(meter: MeshMeter, survey: Survey | None = None) -> ClusterSpec:
    """The nodes of the job; with the rates of a survey, if there is one."""
    hosts = Hosts(meter.nodes, node_names(meter.hosts), meter.addresses)
    return make_cluster("this job", hosts, survey, meter.latencies)


def _far(meter: MeshMeter, described: ClusterSpec, order: Sequence[int]) -> list[str]:
    """Phrases on far rates; ``order`` has the meter's index of each described node."""

    def rates(flows: Sequence[Flow], factor: float) -> list[float]:
        return meter.rates([(order[i], order[j]) for i, j in flows], factor)

    flows, found = everybody(len(order)), list[str]()
    measured = rates(flows, FULL_WINDOWS)
    if links := far_links(described, flows, measured):
        again = rates(flows, DECISIVE_WINDOWS)
        # No rates: there was no time.
        return [text for link, text in far_links(described, flows, again).items() if link in links and any(again)]
    suspects = far_rates(described, flows, measured)
    for node in dict.fromkeys(node for node, _ in suspects):
        fans = {sends: [flow for flow in flows if flow[not sends] == node] for sends in (True, False)}
        meter.prepare([[(order[i], order[j]) for i, j in fan] for fan in fans.values()], DECISIVE_WINDOWS)
        for sends, fan in fans.items():
            measured = rates(fan, DECISIVE_WINDOWS)
            if (node, sends) in suspects and any(measured):  # otherwise there was no time
                found += [text for end, text in far_rates(described, fan, measured).items() if end == (node, sends)]
    return list(dict.fromkeys(found))
