"""The hosts and links of a live job in a few seconds: every rank calls `survey_job`, and all get the same answer."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.measure.errors import LaunchError
from lightning_autosync.measure.probe.mesh_meter import MeshMeter
from lightning_autosync.measure.probe.shape import Hosts, make_cluster, node_names
from lightning_autosync.measure.probe.survey import take_survey


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
        LaunchError: on every rank, if the system is not Linux.
    """
    meter = MeshMeter(timeout, limit)
    survey, fault = None, None
    if len(meter.nodes) > 1:
        try:
            with meter.connected():
                survey = take_survey(meter, len(meter.nodes), every_pair=None)
        except LaunchError as error:
            fault = str(error)
    if survey is not None and survey.nodes == 2:
        survey.paces.clear()
    hosts = Hosts(meter.nodes, node_names(meter.hosts), meter.addresses)
    cluster = make_cluster("this job", hosts, survey, meter.latencies)
    answers = gather_json([cluster.to_dict(), meter.elapsed()])
    # Hosts may round differently, so the first rank's cluster counts.
    cluster = ClusterSpec.from_dict(answers[0][0], source="survey")
    return JobSurvey(cluster, max(seconds for _, seconds in answers), meter.machines, fault)
