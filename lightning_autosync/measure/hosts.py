"""Host constants for the replay and the bound, depending on where the ranks of a job run."""

from __future__ import annotations

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.measure.conditions import usable_cores
from lightning_autosync.measure.emulation.launch import BURST
from lightning_autosync.measure.probe.constants import fit_constants
from lightning_autosync.measure.probe.hosts import host_costs
from lightning_autosync.measure.probe.job import probe_hosts
from lightning_autosync.measure.session import MeasurementSession, Pool
from lightning_autosync.replay import Bound, Constants
from lightning_autosync.replay import least_step as least_step_of_links
from lightning_autosync.workload import Workload

_BURST = 1024 * int(BURST.removesuffix("kb"))
"""Bytes of a burst, as configured in the token buckets of emulated links."""


def probed_hosts(pool: Pool, cluster: ClusterSpec, scheduling: str) -> Constants:
    """Probe the constants of a pool's hosts; the constants of links are those of `emulated_hosts`.

    Raises:
        WorkerError: a worker failed.
    """
    leaders = [cluster.ranks_of(node)[0] for node in range(len(cluster.nodes))]
    probe = pool.run(probe_hosts, leaders=leaders, scheduling=scheduling)[0]
    devices = [len(cluster.ranks_of(node)) for node in range(len(cluster.nodes))]
    links = emulated_hosts()
    found = fit_constants(probe, scheduling, machines=1, devices=devices, accelerated=True)
    return found.model_copy(update={"burst": links.burst, "sharing_loss": links.sharing_loss})


def emulated_hosts(path: str | None = None, cores: float | None = None) -> Constants:
    """Constants for emulated links: from a probe's file, or defaults with ``cores`` (None: all of this machine's).

    Paced computation occupies no core, like computation on an accelerator.

    Raises:
        DocumentError: the file does not contain constants.
    """
    if path is not None:
        return Constants.load(path).model_copy(update={"accelerated": True})
    return Constants(cores=cores or usable_cores(), burst=_BURST, accelerated=True)


def job_hosts(launch: str, paced: bool, path: str | None = None, cores: float | None = None) -> Constants:
    """Constants for the replay of a job.

    Args:
        launch: kind of the launch. Ranks on this machine share its cores; only emulated links let bursts pass.
        paced: whether computation is paced, so that it occupies no core, like computation on an accelerator.
        path: file of constants from a probe; None uses the defaults.
        cores: number of cores of the machine on which the job ran; None takes those of this machine.

    Raises:
        DocumentError: the file does not contain constants.
    """
    if path is not None:
        known = Constants.load(path)
    elif launch == "emulated":
        known = emulated_hosts(cores=cores)
    else:
        known = Constants(cores=(cores or usable_cores()) if launch == "local" else None)
    return known.model_copy(update={"accelerated": paced})


def measured_hosts(workers: MeasurementSession | Pool, launch: str, paced: bool) -> tuple[Constants, str]:
    """Constants for the replay of a job whose workers are alive: they measure their hosts in 0.1 to 0.2 s, as jobs do.

    Args:
        workers: the workers; all of them measure at the same time.
        launch, paced: as for `job_hosts`, from which the constants of links are.

    Returns:
        The constants, and a sentence for the user. They are those of `job_hosts` if a worker cannot measure.

    Raises:
        WorkerError: a worker failed.
    """
    usual = job_hosts(launch, paced)
    found = Constants.from_dict(workers.run(host_costs)[0], source="costs of the hosts")
    if found == Constants(cores=found.cores, restarts=found.restarts):
        return usual, "predictions take default costs of hosts, because a worker could not measure its own"
    known = found.model_copy(update={"burst": usual.burst, "accelerated": paced})
    cost, default = (f"{1e6 * each.gradient_cost:.0f} us" for each in (known, usual))
    return known, f"predictions take the hosts' costs, measured on the workers: {cost} a gradient (default: {default})"


def least_step(workload: Workload, cluster: ClusterSpec) -> Bound:
    """`lightning_autosync.replay.least_step` on a cluster's emulated links.

    Their rates include framing. After a pause each direction of a link lets a burst of 128 KiB pass at once. The bound
    subtracts the burst in every step, so that it holds for a single step whatever the links did before. The burst is
    10 ms of the 715 ms of ``experiment=fat_star_4``, but the whole time of a message of some KiB, which hosts limit.
    """
    links = emulated_hosts()
    return least_step_of_links(workload, cluster, links.framing, links.burst)
