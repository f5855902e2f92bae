"""The least step time of a workload on a cluster, whatever its exact plan."""

from __future__ import annotations

from lightning_autosync.cluster import ClusterSpec, least_step_time
from lightning_autosync.simulator.compute import ready_times
from lightning_autosync.workload import Variable, Workload


def step_bound(workload: Workload, cluster: ClusterSpec, framing: float = 1.0) -> float:
    """The least seconds of a step; :func:`~lightning_autosync.cluster.overlap.least_step_time` derives it.

    Ready times that are unknown are those that the replay assumes. Of a table only the touched rows count, as if all
    ranks touched the same ones.

    Args:
        workload: variables and times.
        cluster: with known rates.
        framing: bytes on the wire for each byte of payload.

    Raises:
        ClusterError: the rates of the cluster are unknown.
    """
    ready = ready_times(workload)
    return least_step_time(
        cluster,
        [(ready[variable.name], changed_bytes(variable)) for variable in workload.variables],
        workload.forward_time,
        workload.backward_time,
        workload.optimizer_time,
        framing,
    )


def changed_bytes(variable: Variable) -> float:
    """Bytes of a dense gradient, or of the rows that one rank touches."""
    return variable.bytes if variable.rows is None else variable.rows / variable.shape[0] * variable.bytes
