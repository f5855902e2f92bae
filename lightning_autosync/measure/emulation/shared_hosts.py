"""The hosts' constants where ranks share this machine and compute by the clock."""

from __future__ import annotations

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.measure.emulation.launch import BURST
from lightning_autosync.measure.probe.constants import fit_constants
from lightning_autosync.measure.workers import WorkerPool
from lightning_autosync.measure.workers.cores import usable_cores
from lightning_autosync.replay import Constants

_BURST = 1024 * int(BURST.removesuffix("kb"))
"""Bytes, as the emulated links' token buckets are set."""


_PROBE = "lightning_autosync.measure.probe.job:probe_hosts"


def probed_hosts(pool: WorkerPool, cluster: ClusterSpec, scheduling: str) -> Constants:
    """The constants of a pool's hosts as they are just now, of the links those of `shared_hosts`.

    Raises:
        WorkerError: a worker failed.
    """
    leaders = [cluster.ranks_of(node)[0] for node in range(len(cluster.nodes))]
    probe = pool.run(_PROBE, leaders=leaders, scheduling=scheduling)[0]
    devices = [len(cluster.ranks_of(node)) for node in range(len(cluster.nodes))]
    links = shared_hosts()
    found = fit_constants(probe, scheduling, machines=1, devices=devices, accelerated=True)
    return found.model_copy(update={"burst": links.burst, "sharing_loss": links.sharing_loss})


def shared_hosts(path: str | None = None, cores: float | None = None) -> Constants:
    """The constants in a probe's file, or the defaults on ``cores`` (None: all of this machine's) and emulated links.

    Paced gradients take no core, as those of an accelerator.

    Raises:
        DocumentError: the file is not one of constants.
    """
    if path is not None:
        return Constants.load(path).model_copy(update={"accelerated": True})
    return Constants(cores=cores or usable_cores(), burst=_BURST, accelerated=True)
