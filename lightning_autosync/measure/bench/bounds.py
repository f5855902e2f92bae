"""The least time that any exact method can take for a step behind emulated links."""

from __future__ import annotations

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.measure.emulation.shared_hosts import shared_hosts
from lightning_autosync.replay import Bound
from lightning_autosync.replay import least_step as least_step_of_links
from lightning_autosync.workload import Workload

__all__ = ["Bound", "least_step"]


def least_step(workload: Workload, cluster: ClusterSpec) -> Bound:
    """`lightning_autosync.replay.least_step` on a cluster's emulated links.

    Their rates count framing. Each direction of a link lets a burst of 128 KiB pass at once after a rest, which the
    bound takes off in every step: the least time of any single one, whatever its links did before. That is 10 ms of the
    715 ms that ``experiment=fat_star_4`` takes, and all of what a message of some KiB asks of its links, which is bound
    by hosts and not by links.
    """
    links = shared_hosts()
    return least_step_of_links(workload, cluster, links.framing, links.burst)
