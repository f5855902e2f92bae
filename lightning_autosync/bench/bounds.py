"""The least time that any exact method can take for a step behind emulated links."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.simulator.bound import step_bound
from lightning_autosync.workload import Variable, Workload

FRAMING = 1514 / 1448
"""Bytes of a full Ethernet frame over its payload, with TCP/IPv4 and timestamps."""


@dataclass(frozen=True)
class Bound:
    """A least time.

    Attributes:
        seconds: the bound on a step.
        compute: the seconds of paced computation in a step.
        meaning: which bound it is, for a reader.
    """

    seconds: float
    compute: float
    meaning: str


def least_step(workload: Workload, cluster: ClusterSpec) -> Bound:
    """The bound on a step, in which synchronization overlaps with backward and ends before the next forward.

    Beside :func:`lightning_autosync.simulator.bound.step_bound`, all rows that others touched must arrive.

    Args:
        workload: its tables ``row_sparse``; without times, computation takes none.
        cluster: with known rates.
    """
    compute = workload.forward_time + workload.backward_time
    arrivals = workload.forward_time + FRAMING * arrival_time(workload, cluster)
    seconds = max(step_bound(workload, cluster, FRAMING), arrivals)
    if compute == 0:
        return Bound(seconds, compute, "synchronization alone, framing included")
    return Bound(seconds, compute, "forward, then backward and synchronization (framing included) side by side")


def arrival_time(workload: Workload, cluster: ClusterSpec) -> float:
    """Seconds in which what a node's ranks need of all others can come in, at the slowest node.

    These are the dense gradients and every row that one of the others touched, if each draws its rows evenly from all.
    """
    times = [0.0]
    for node in cluster.nodes:
        others = cluster.world_size - node.devices
        if others:
            needed = sum(variable.bytes * _share(variable, others) for variable in workload.variables)
            times.append(needed / _rate_in(cluster, node.name))
    return max(times)


def _rate_in(cluster: ClusterSpec, name: str) -> float:
    into = [link.bandwidth for link in cluster.links if link.b == name]
    into += [link.reverse_bandwidth for link in cluster.links if link.a == name]
    return sum(rate for rate in into if rate is not None)


def _share(variable: Variable, ranks: int) -> float:
    """The share of a variable's bytes that at least one of so many ranks changed; of a dense one, all."""
    if variable.rows is None:
        return 1.0
    return 1.0 - (1.0 - variable.rows / variable.shape[0]) ** ranks
